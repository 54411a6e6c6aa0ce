"""Contains the shared maths of algorithms, as pure functions on flat float32 token tensors.

This package is public API for algorithm plug-ins: ``from algorithms import functional as F``. Start reading in
`losses.py`.

Shapes: ``[tokens]`` has one entry per response token of a micro-batch or a group, ``[samples]`` one entry per sample.
``sample_ids`` ``[tokens]`` int64 is the index of each token's sample. ``loss_mask`` ``[tokens]`` bool is True for
trained tokens. A masked token (False) changes no value and no gradient, even if its log-probs are not finite.
Log-ratios are clamped to [-20, 20] before `exp` to prevent overflow. Outside of the clamp the gradient is 0.
"""

from __future__ import annotations

from algorithms.functional.advantages import (
    discounted_rewards,
    drop_all_equal,
    generalized_advantages,
    length_adaptive_lambda,
    normalize_over_step,
    overlong_penalty,
    reward_to_go,
    token_rewards,
)
from algorithms.functional.aggregation import (
    AGGREGATIONS,
    aggregate_denominator,
    aggregate_sum,
    sample_means,
    sample_sums,
)
from algorithms.functional.baselines import (
    DEVIATIONS,
    LEAVE_ONE_OUT_DEVIATIONS,
    divide_by_step_deviation,
    group_relative_advantages,
    leave_one_out_advantages,
    pass_at_k_advantages,
)
from algorithms.functional.corrections import (
    CORRECTION_LEVELS,
    CORRECTIONS,
    correction_weights,
    divide_by_mean_weight,
    opsm_mask,
    weights_to_average,
)
from algorithms.functional.distillation import (
    TOP_K_DIVERGENCES,
    append_tail_logprob,
    teacher_log_ratio,
    top_k_divergence,
)
from algorithms.functional.losses import (
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    sapo_policy_loss,
)
from algorithms.functional.preferences import PREFERENCE_LOSSES, preference_loss
from algorithms.functional.ratios import (
    KL_ESTIMATORS,
    KL_LOSSES,
    MAX_KL,
    MAX_LOG_RATIO,
    kl_estimate,
    kl_loss,
    masked_log_ratio,
)
from algorithms.functional.rejection import REJECTION_RULES, rejection_mask
from algorithms.functional.trust_region import CISPO_TRUST_REGIONS, TRUST_REGIONS, outside_trust_region
from algorithms.functional.turns import anchor_advantages, token_turn_rewards, turn_returns
from algorithms.functional.value_loss import ValueLoss, clipped_value_loss

__all__ = [
    "AGGREGATIONS",
    "CISPO_TRUST_REGIONS",
    "CORRECTIONS",
    "CORRECTION_LEVELS",
    "DEVIATIONS",
    "KL_ESTIMATORS",
    "KL_LOSSES",
    "LEAVE_ONE_OUT_DEVIATIONS",
    "MAX_KL",
    "MAX_LOG_RATIO",
    "PREFERENCE_LOSSES",
    "REJECTION_RULES",
    "TOP_K_DIVERGENCES",
    "TRUST_REGIONS",
    "PolicyLoss",
    "ValueLoss",
    "aggregate_denominator",
    "aggregate_sum",
    "anchor_advantages",
    "append_tail_logprob",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "correction_weights",
    "discounted_rewards",
    "divide_by_mean_weight",
    "divide_by_step_deviation",
    "drop_all_equal",
    "generalized_advantages",
    "group_relative_advantages",
    "gspo_policy_loss",
    "kl_estimate",
    "kl_loss",
    "leave_one_out_advantages",
    "length_adaptive_lambda",
    "masked_log_ratio",
    "normalize_over_step",
    "opsm_mask",
    "outside_trust_region",
    "overlong_penalty",
    "pass_at_k_advantages",
    "preference_loss",
    "rejection_mask",
    "reward_to_go",
    "sample_means",
    "sample_sums",
    "sapo_policy_loss",
    "teacher_log_ratio",
    "token_rewards",
    "token_turn_rewards",
    "top_k_divergence",
    "turn_returns",
    "weights_to_average",
]

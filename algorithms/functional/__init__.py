"""The maths that policy-gradient algorithms share, as pure functions on flat float32 token tensors.

This package is public API for algorithm plug-ins: ``from algorithms import functional as F``. Start reading in
`losses.py`.

Shapes: ``[tokens]`` has one entry per response token of a micro-batch or a group, ``[samples]`` one entry per sample.
``sample_ids`` ``[tokens]`` int64 holds the index of each token's sample. ``loss_mask`` ``[tokens]`` bool is True for
tokens that are trained. A token whose mask is False changes no value and no gradient, even if its log-probs are not
finite. Log-ratios are clamped to [-20, 20] before `exp`, so that nothing overflows. Beyond the clamp the gradient is 0.
"""

from __future__ import annotations

from algorithms.functional.advantages import (
    discounted_rewards,
    drop_all_equal,
    generalized_advantages,
    length_adaptive_lambda,
    normalize_over_step,
    overlong_penalty,
    rewards_of_tokens,
    sums_to_the_end,
)
from algorithms.functional.aggregation import (
    AGGREGATIONS,
    aggregate_denominator,
    aggregate_sum,
    mean_of_samples,
    sum_of_samples,
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
    kept_by_opsm,
    weights_to_average,
)
from algorithms.functional.distillation import TOP_K_DIVERGENCES, teacher_log_ratio, top_k_divergence, with_tail
from algorithms.functional.losses import (
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    sapo_policy_loss,
)
from algorithms.functional.ratios import (
    KL_ESTIMATORS,
    KL_LOSSES,
    MAX_KL,
    MAX_LOG_RATIO,
    kl_estimate,
    kl_loss,
    masked_log_ratio,
)
from algorithms.functional.rejection import REJECTION_RULES, kept_by_rejection
from algorithms.functional.trust_region import CISPO_TRUST_REGIONS, TRUST_REGIONS, moved_too_far
from algorithms.functional.turns import anchor_advantages, turn_returns, turn_rewards_of_tokens
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
    "REJECTION_RULES",
    "TOP_K_DIVERGENCES",
    "TRUST_REGIONS",
    "PolicyLoss",
    "ValueLoss",
    "aggregate_denominator",
    "aggregate_sum",
    "anchor_advantages",
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
    "kept_by_opsm",
    "kept_by_rejection",
    "kl_estimate",
    "kl_loss",
    "leave_one_out_advantages",
    "length_adaptive_lambda",
    "masked_log_ratio",
    "mean_of_samples",
    "moved_too_far",
    "normalize_over_step",
    "overlong_penalty",
    "pass_at_k_advantages",
    "rewards_of_tokens",
    "sapo_policy_loss",
    "sum_of_samples",
    "sums_to_the_end",
    "teacher_log_ratio",
    "top_k_divergence",
    "turn_returns",
    "turn_rewards_of_tokens",
    "weights_to_average",
    "with_tail",
]

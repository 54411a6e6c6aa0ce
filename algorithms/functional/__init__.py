"""The maths that policy-gradient algorithms share: pure functions on flat float32 token tensors.

Shapes: ``[tokens]`` is every response token of a micro-batch, ``[samples]`` one entry a sample; ``sample_ids``
``[tokens]`` int64 maps the one to the other. A masked token has no influence on any value or gradient, also where its
log-probs are not finite. Log-ratios are clamped to ±20 before `exp`, so nothing overflows; beyond the clamp the
gradient is 0.
"""

from __future__ import annotations

from algorithms.functional.advantages import (
    drop_all_equal,
    generalized_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
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
from algorithms.functional.corrections import CORRECTION_LEVELS, CORRECTIONS, correction_weights, kept_by_opsm
from algorithms.functional.distillation import TOP_K_DIVERGENCES, teacher_log_ratio, top_k_divergence, with_tail
from algorithms.functional.losses import (
    PolicyLoss,
    ValueLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    clipped_value_loss,
    gspo_policy_loss,
    sapo_policy_loss,
)
from algorithms.functional.ratios import KL_ESTIMATORS, MAX_LOG_RATIO, kl_estimate, masked_log_ratio

__all__ = [
    "AGGREGATIONS",
    "CORRECTIONS",
    "CORRECTION_LEVELS",
    "KL_ESTIMATORS",
    "MAX_LOG_RATIO",
    "TOP_K_DIVERGENCES",
    "PolicyLoss",
    "ValueLoss",
    "aggregate_denominator",
    "aggregate_sum",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "correction_weights",
    "drop_all_equal",
    "generalized_advantages",
    "group_relative_advantages",
    "gspo_policy_loss",
    "kept_by_opsm",
    "kl_estimate",
    "leave_one_out_advantages",
    "masked_log_ratio",
    "mean_of_samples",
    "normalize_over_step",
    "overlong_penalty",
    "rewards_of_tokens",
    "sapo_policy_loss",
    "sum_of_samples",
    "sums_to_the_end",
    "teacher_log_ratio",
    "top_k_divergence",
    "with_tail",
]

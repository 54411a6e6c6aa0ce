"""Contains the shared parts of all policy-gradient algorithms: settings, checks, advantages and loss terms.

This package is public API for algorithm plug-ins: ``from algorithms import policy_gradient as P``. Start reading in
`outputs.py`, which computes `LossOutputs` from a policy loss per token (correction, rejection, OPSM, KL, entropy bonus,
aggregation, metrics).
"""

from __future__ import annotations

from algorithms.policy_gradient.advantages import (
    credited_advantages,
    group_advantages,
    penalized_rewards,
    sample_advantages,
    step_advantages,
    token_penalties,
)
from algorithms.policy_gradient.checks import (
    baseline_problems,
    choice_problems,
    clip_problems,
    common_problems,
    credit_problems,
    deviation_problems,
    group_problems,
    not_positive_problems,
    offline_problems,
    refuse,
    token_clip_problems,
)
from algorithms.policy_gradient.config import (
    ClipConfig,
    CreditConfig,
    DeviationConfig,
    GroupConfig,
    PolicyGradientConfig,
    TokenClipConfig,
    credit_requirements,
    denominator,
    group_requirements,
    requirements,
)
from algorithms.policy_gradient.outputs import clipped_loss, metric_sums, old_logprobs, outputs
from algorithms.policy_gradient.step_normalization import normalize_group, normalize_weights

__all__ = [
    "ClipConfig",
    "CreditConfig",
    "DeviationConfig",
    "GroupConfig",
    "PolicyGradientConfig",
    "TokenClipConfig",
    "baseline_problems",
    "choice_problems",
    "clip_problems",
    "clipped_loss",
    "common_problems",
    "credit_problems",
    "credit_requirements",
    "credited_advantages",
    "denominator",
    "deviation_problems",
    "group_advantages",
    "group_problems",
    "group_requirements",
    "metric_sums",
    "normalize_group",
    "normalize_weights",
    "not_positive_problems",
    "offline_problems",
    "old_logprobs",
    "outputs",
    "penalized_rewards",
    "refuse",
    "requirements",
    "sample_advantages",
    "step_advantages",
    "token_clip_problems",
    "token_penalties",
]

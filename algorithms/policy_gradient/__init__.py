"""What all policy-gradient algorithms here share: their common knobs, the checks, and the way from a policy loss per
token to a `LossOutputs` (correction, OPSM, KL, entropy bonus, aggregation, metrics)."""

from __future__ import annotations

from algorithms.policy_gradient.checks import above_zero, clip_problems, common_problems, group_problems, refuse
from algorithms.policy_gradient.knobs import ClipKnobs, PolicyGradientKnobs, denominator, needs
from algorithms.policy_gradient.outputs import clipped_loss, metric_sums, old_logprobs, outputs
from algorithms.policy_gradient.rewards import penalized_rewards, token_penalties

__all__ = [
    "ClipKnobs",
    "PolicyGradientKnobs",
    "above_zero",
    "clip_problems",
    "clipped_loss",
    "common_problems",
    "denominator",
    "group_problems",
    "metric_sums",
    "needs",
    "old_logprobs",
    "outputs",
    "penalized_rewards",
    "refuse",
    "token_penalties",
]

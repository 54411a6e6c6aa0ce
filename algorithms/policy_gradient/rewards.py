"""Rewards with the KL to the reference in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms.policy_gradient.knobs import PolicyGradientKnobs
from relax_core.contracts.algorithm import AdvantageInputs

if TYPE_CHECKING:
    from torch import Tensor


def token_penalties(inputs: AdvantageInputs, knobs: PolicyGradientKnobs) -> Tensor | None:
    """``[tokens]`` kl_coef × KL of the policy that sampled against the reference, where it belongs into the reward."""
    if knobs.kl_coef == 0 or knobs.kl_placement == "loss":
        return None
    assert inputs.old_logprobs is not None and inputs.reference_logprobs is not None, "needs() asked for a reference"
    return knobs.kl_coef * F.kl_estimate(
        logprobs=inputs.old_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        loss_mask=inputs.loss_mask,
        estimator=knobs.kl_estimator,
    )


def penalized_rewards(inputs: AdvantageInputs, knobs: PolicyGradientKnobs) -> Tensor:
    """``[samples]`` rewards, less each sample's summed KL penalty where ``kl_placement`` is "reward"."""
    penalties = token_penalties(inputs, knobs)
    if penalties is None:
        return inputs.rewards
    return inputs.rewards - F.sum_of_samples(
        per_token=penalties,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
    )

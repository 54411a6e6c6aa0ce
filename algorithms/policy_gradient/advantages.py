"""From a group's rewards to advantages, with the KL to the reference in them, and what follows from a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms.policy_gradient.config import DeviationConfig, GroupConfig, PolicyGradientConfig
from relax_core.contracts.algorithm import AdvantageInputs

if TYPE_CHECKING:
    from torch import Tensor


def token_penalties(inputs: AdvantageInputs, config: PolicyGradientConfig) -> Tensor | None:
    """``[tokens]`` kl_coef × KL of the policy that sampled against the reference, where it belongs into the reward."""
    if config.kl_coef == 0 or config.kl_placement != "reward":
        return None
    assert inputs.old_logprobs is not None and inputs.reference_logprobs is not None, (
        "requirements() asked for a reference"
    )
    return config.kl_coef * F.kl_estimate(
        logprobs=inputs.old_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        loss_mask=inputs.loss_mask,
        estimator=config.kl_estimator,
    )


def penalized_rewards(inputs: AdvantageInputs, config: PolicyGradientConfig) -> Tensor:
    """``[samples]`` rewards, less each sample's summed KL penalty where ``kl_placement`` is "reward"."""
    penalties = token_penalties(inputs, config)
    if penalties is None:
        return inputs.rewards
    return inputs.rewards - F.sum_of_samples(
        per_token=penalties,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
    )


def sample_advantages(rewards: Tensor, config: GroupConfig) -> Tensor:
    """``[samples]``: one group's rewards relative to each other, or by the best of ``pass_k`` samples."""
    normalize_std, std_epsilon = config.normalize_std == "group", config.std_epsilon
    if config.pass_k > 1:
        return F.pass_at_k_advantages(
            rewards=rewards, k=config.pass_k, normalize_std=normalize_std, std_epsilon=std_epsilon
        )
    return F.group_relative_advantages(rewards=rewards, normalize_std=normalize_std, std_epsilon=std_epsilon)


def group_advantages(inputs: AdvantageInputs, config: GroupConfig) -> Tensor:
    """``[tokens]`` float32: every token of a sample carries the sample's advantage, relative to its group."""
    return sample_advantages(penalized_rewards(inputs, config), config)[inputs.sample_ids]


def normalize_weights(
    advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: PolicyGradientConfig
) -> list[Tensor]:
    """Over the mean correction weight of the step, where ``correction`` is "tis_normalized"; else as they are."""
    if config.correction != "tis_normalized":
        return list(advantages)
    weights = []
    for one in inputs:
        assert one.old_logprobs is not None and one.rollout_logprobs is not None, "requirements() asked for both"
        of_tokens, _ = F.correction_weights(
            old_logprobs=one.old_logprobs,
            rollout_logprobs=one.rollout_logprobs,
            loss_mask=one.loss_mask,
            sample_ids=one.sample_ids,
            num_samples=one.rewards.numel(),
            method=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
        weights.append(
            F.weights_to_average(
                weights=of_tokens,
                loss_mask=one.loss_mask,
                sample_ids=one.sample_ids,
                num_samples=one.rewards.numel(),
                level=config.correction_level,
            )
        )
    return F.divide_by_mean_weight(advantages=advantages, weights=weights)


def normalize_group(
    advantages: Sequence[Tensor],
    inputs: Sequence[AdvantageInputs],
    config: DeviationConfig,
    *,
    rewards: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Over the standard deviation of all of the step's rewards, where ``normalize_std`` is "batch"; and
    `normalize_weights`. ``rewards``: one ``[samples]`` tensor a group, where they are not `penalized_rewards`."""
    if config.normalize_std == "batch":
        advantages = F.divide_by_step_deviation(
            advantages=advantages,
            rewards=[penalized_rewards(one, config) for one in inputs] if rewards is None else rewards,
            std_epsilon=config.std_epsilon,
        )
    return normalize_weights(advantages, inputs, config)

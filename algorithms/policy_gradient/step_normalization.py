"""Normalises advantages over a train step: by the std of the step's rewards or by the step's mean correction weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms.policy_gradient.advantages import penalized_rewards
from algorithms.policy_gradient.config import DeviationConfig, PolicyGradientConfig
from relax_core.contracts.algorithm import AdvantageInputs

if TYPE_CHECKING:
    from torch import Tensor


def normalize_weights(
    advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: PolicyGradientConfig
) -> list[Tensor]:
    """Divides advantages by the step's mean correction weight if ``correction`` is "tis_normalized".

    Otherwise the advantages are unchanged. ``advantages`` and ``inputs`` have one entry per group of the train step.
    """
    if config.correction != "tis_normalized":
        return list(advantages)
    weights = []
    for group_input in inputs:
        assert group_input.old_logprobs is not None and group_input.rollout_logprobs is not None, (
            "requirements() requests both"
        )
        of_tokens, _ = F.correction_weights(
            old_logprobs=group_input.old_logprobs,
            rollout_logprobs=group_input.rollout_logprobs,
            loss_mask=group_input.loss_mask,
            sample_ids=group_input.sample_ids,
            num_samples=group_input.rewards.numel(),
            method=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            high=config.correction_high,
        )
        weights.append(
            F.weights_to_average(
                weights=of_tokens,
                loss_mask=group_input.loss_mask,
                sample_ids=group_input.sample_ids,
                num_samples=group_input.rewards.numel(),
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
    """Divides advantages by the std of the step's rewards if ``normalize_std`` is "batch".

    Then calls `normalize_weights`.

    ``advantages`` and ``inputs`` have one entry per group of the train step. ``rewards`` has one ``[samples]`` tensor
    per group. The default is `penalized_rewards`.
    """
    if config.normalize_std == "batch":
        advantages = F.divide_by_step_deviation(
            advantages=advantages,
            rewards=[penalized_rewards(group_input, config) for group_input in inputs] if rewards is None else rewards,
            std_epsilon=config.std_epsilon,
        )
    return normalize_weights(advantages, inputs, config)

"""An algorithm with advantages of rewards minus a quantile of the group's rewards, and with Relax's PPO loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QuantileConfig(P.TokenClipConfig):
    name: str = "quantile_baseline"
    quantile: float = 0.5  # quantile of the group's rewards that is the baseline; 0.5 is the median


def check(config: QuantileConfig) -> None:
    """Raises ValueError with one line for each invalid value."""
    problems = P.baseline_problems(config) + P.token_clip_problems(config, usual="0.2 and 0.2 are usual.")
    if not 0 <= config.quantile <= 1:
        problems.append(f"algo.quantile={config.quantile}: a quantile lies between 0 and 1. 0.5 is the median.")
    P.refuse(problems)


def advantages(inputs: AdvantageInputs, config: QuantileConfig) -> Tensor:
    """Returns ``[tokens]`` float32: each sample's reward minus the group's quantile, the same for all of its tokens."""
    rewards = P.penalized_rewards(inputs, config)  # [samples], minus the KL penalty if algo.kl_placement=reward
    return (rewards - rewards.quantile(config.quantile))[inputs.sample_ids]


SPEC = AlgorithmSpec(
    name="quantile_baseline",
    summary="PPO's clip with a quantile of the group's rewards as the baseline",
    config=QuantileConfig,
    requirements=P.requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
)

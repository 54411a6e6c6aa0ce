"""PPO (arXiv 1707.06347): a critic, GAE advantages (arXiv 1506.02438) whitened over the step, and a clipped loss.

The reward of a turn is given at its last trained token. The critic has a clipped value loss. It is a separate model, so
its loss needs no coefficient. The presets use two epochs. The paper uses 10 epochs with a discount of 0.99 on
continuous control and 3 epochs on Atari (tables 3 and 5), and its value loss has no clip. ``gae_alpha`` above 0 selects
VAPO's decoupled, length-adaptive GAE (arXiv 2504.05118): λ of the advantages depends on the response length, and λ of
the critic's returns is ``gae_lambda``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, LossOutputs, Requirements, ValueInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PpoConfig(P.TokenClipConfig):
    """Holds the settings of PPO. conf/algo documents the values."""

    name: str = "ppo"
    epochs: int = 2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_alpha: float = 0.0
    value_clip: float = 0.2
    std_epsilon: ClassVar[float] = 1e-8


def requirements(config: PpoConfig) -> Requirements:
    """Returns `policy_gradient.requirements` with whole steps, turns and a critic."""
    return dataclasses.replace(P.requirements(config, whole_step=True, turns=True), critic=True)


def check(config: PpoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes.

    Groups of one sample are allowed.
    """
    problems = P.common_problems(config) + P.token_clip_problems(config, usual="PPO uses 0.2 and 0.2.")
    for key in ("gamma", "gae_lambda"):
        if not 0 <= getattr(config, key) <= 1:
            problems.append(f"algo.{key}={getattr(config, key)}: must lie in [0, 1]. 1 and 0.95 are usual.")
    if config.gae_alpha < 0:
        problems.append(f"algo.gae_alpha={config.gae_alpha}: must not be negative. VAPO uses 0.05; 0 is off.")
    if config.value_clip < 0:
        problems.append(f"algo.value_clip={config.value_clip}: must not be negative. PPO uses 0.2; 0 is off.")
    P.refuse(problems)


def advantages(inputs: AdvantageInputs, config: PpoConfig) -> Tensor:
    """Returns the GAE advantages before `normalize`, ``[tokens]`` float32."""
    if config.gae_alpha == 0:
        return _generalized(inputs, config, config.gae_lambda)
    gae_lambda = F.length_adaptive_lambda(
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
        alpha=config.gae_alpha,
    )
    return _generalized(inputs, config, gae_lambda)


def returns(inputs: AdvantageInputs, advantages: Tensor, config: PpoConfig) -> Tensor:
    """Returns the critic's targets, ``[tokens]``: the advantages with λ = ``gae_lambda`` plus the values."""
    assert inputs.values is not None, "requirements() requests a critic"
    if config.gae_alpha > 0:
        advantages = _generalized(inputs, config, config.gae_lambda)
    return advantages + inputs.values


def _generalized(inputs: AdvantageInputs, config: PpoConfig, gae_lambda: float | Tensor) -> Tensor:
    turns = inputs.turns
    assert inputs.values is not None and turns is not None, "requirements() requests a critic and the turns"
    return F.generalized_advantages(
        token_rewards=F.token_turn_rewards(
            turn_rewards=turns.rewards,
            turn_samples=turns.samples,
            turn_ids=turns.of_tokens,
            penalties=P.token_penalties(inputs, config),
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
        ),
        values=inputs.values,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
        gamma=config.gamma,
        gae_lambda=gae_lambda,
    )


def normalize(advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: PpoConfig) -> list[Tensor]:
    """Whitens the advantages over all trained tokens of a train step's groups."""
    masks = [group_input.loss_mask for group_input in inputs]
    whitened = F.normalize_over_step(advantages=advantages, loss_masks=masks, std_epsilon=config.std_epsilon)
    return P.normalize_weights(whitened, inputs, config)


def value_loss(inputs: ValueInputs, config: PpoConfig) -> LossOutputs:
    """Returns the critic's loss. The metric ``clip`` is the share of tokens that lose their gradient by the clip."""
    critic = F.clipped_value_loss(
        values=inputs.values,
        old_values=inputs.old_values,
        returns=inputs.returns,
        loss_mask=inputs.loss_mask,
        clip=config.value_clip,
    )
    return LossOutputs(
        loss_sum=F.aggregate_sum(
            per_token=critic.per_token,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            aggregation=config.aggregation,
        ),
        per_token=critic.per_token.detach(),
        metric_sums={"clip": (critic.cut.sum(), inputs.loss_mask.sum())},
    )


SPEC = AlgorithmSpec(
    name="ppo",
    summary="PPO clip with a critic, GAE, whitened advantages",
    config=PpoConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=normalize,
    value_loss=value_loss,
    returns=returns,
)

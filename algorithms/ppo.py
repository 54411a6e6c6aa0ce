"""PPO (arXiv 1707.06347) with a critic: advantages a token by GAE (arXiv 1506.02438), whitened over the step; the clip;
a clipped value loss. The critic is a model of its own, so its loss needs no coefficient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, LossOutputs, Needs, ValueInputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PpoKnobs(P.ClipKnobs):
    """Values are documented in conf/algo."""

    name: str = "ppo"
    epochs: int = 2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    std_epsilon: float = 1e-8


def needs(knobs: PpoKnobs) -> Needs:
    """What `policy_gradient.needs` says, and a critic."""
    return dataclasses.replace(P.needs(knobs), critic=True)


def check(knobs: PpoKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix. A group of one is fine here."""
    problems = P.common_problems(knobs) + P.clip_problems(knobs, usual="PPO uses 0.2 and 0.2.")
    for key in ("gamma", "gae_lambda"):
        if not 0 <= getattr(knobs, key) <= 1:
            problems.append(f"algo.{key}={getattr(knobs, key)}: must lie in [0, 1]. 1 and 0.95 are usual.")
    if knobs.value_clip < 0:
        problems.append(f"algo.value_clip={knobs.value_clip}: must not be negative. PPO uses 0.2; 0 is off.")
    P.refuse(problems + P.above_zero(knobs, std_epsilon=1e-8))


def advantages(inputs: AdvantageInputs, knobs: PpoKnobs) -> Tensor:
    """``[tokens]`` float32, before `normalize`: added to the values they are the critic's returns."""
    assert inputs.values is not None, "needs() asked for a critic"
    return F.generalized_advantages(
        token_rewards=F.rewards_of_tokens(
            rewards=inputs.rewards,
            penalties=P.token_penalties(inputs, knobs),
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
        ),
        values=inputs.values,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
        gamma=knobs.gamma,
        gae_lambda=knobs.gae_lambda,
    )


def normalize(advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], knobs: PpoKnobs) -> list[Tensor]:
    """Whitened over all trained tokens of a train step's groups."""
    return F.normalize_over_step(advantages=advantages, loss_masks=loss_masks, std_epsilon=knobs.std_epsilon)


def value_loss(inputs: ValueInputs, knobs: PpoKnobs) -> LossOutputs:
    """The critic's, with ``clip`` as the share of tokens that the clip held back."""
    critic = F.clipped_value_loss(
        values=inputs.values,
        old_values=inputs.old_values,
        returns=inputs.returns,
        loss_mask=inputs.loss_mask,
        clip=knobs.value_clip,
    )
    return LossOutputs(
        loss_sum=F.aggregate_sum(
            per_token=critic.per_token,
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=inputs.num_samples,
            aggregation=knobs.aggregation,
        ),
        per_token=critic.per_token.detach(),
        metric_sums={"clip": (critic.cut.sum(), inputs.loss_mask.sum())},
    )


SPEC = AlgorithmSpec(
    name="ppo",
    summary="PPO clip with a critic, GAE, whitened advantages",
    knobs=PpoKnobs,
    needs=needs,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=normalize,
    value_loss=value_loss,
)

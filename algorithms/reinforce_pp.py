"""REINFORCE++ (arXiv 2501.03262): PPO's clip without critic; advantages normalised over the whole step, not the group.

``group_baseline=true`` is the paper's "REINFORCE++ w/ Baseline" for several samples a prompt: the group's mean is taken
off first, and the KL, where it is on, is k2 as a loss. ``group_baseline=false`` with ``kl_placement=reward`` and
``kl_estimator=k1`` is its plain form: each token is then charged with the KL from it to the response's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReinforcePpKnobs(P.ClipKnobs):
    """Values are documented in conf/algo."""

    name: str = "reinforce_pp"
    group_baseline: bool = True
    std_epsilon: float = 1e-8
    kl_estimator: str = "k2"


def check(knobs: ReinforcePpKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    problems = P.group_problems(knobs) + P.clip_problems(knobs, usual="REINFORCE++ uses 0.2 and 0.2.")
    P.refuse(problems + P.above_zero(knobs, std_epsilon=1e-8))


def advantages(inputs: AdvantageInputs, knobs: ReinforcePpKnobs) -> Tensor:
    """``[tokens]`` float32, before `normalize`."""
    rewards = inputs.rewards
    if knobs.group_baseline:
        rewards = F.group_relative_advantages(rewards=rewards, normalize_std=False, std_epsilon=0.0)
    of_tokens = rewards[inputs.sample_ids]
    penalties = P.token_penalties(inputs, knobs)
    if penalties is None:
        return of_tokens
    return of_tokens - F.sums_to_the_end(per_token=penalties, loss_mask=inputs.loss_mask, sample_ids=inputs.sample_ids)


def normalize(advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], knobs: ReinforcePpKnobs) -> list[Tensor]:
    """Over all trained tokens of a train step's groups."""
    return F.normalize_over_step(advantages=advantages, loss_masks=loss_masks, std_epsilon=knobs.std_epsilon)


SPEC = AlgorithmSpec(
    name="reinforce_pp",
    summary="PPO clip without critic, advantages normalised over the step",
    knobs=ReinforcePpKnobs,
    needs=P.needs,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=normalize,
)

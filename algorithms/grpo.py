"""GRPO (arXiv 2402.03300): advantages relative to the group, PPO's clip, no critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GrpoKnobs(P.ClipKnobs):
    """Every choice that implementations of GRPO make differently, by name. Values are documented in conf/algo."""

    name: str = "grpo"
    normalize_std: bool = True
    std_epsilon: float = 1e-6


def check(knobs: GrpoKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    problems = P.group_problems(knobs) + P.clip_problems(knobs, usual="GRPO uses 0.2 and 0.2, DAPO 0.2 and 0.28.")
    P.refuse(problems + P.above_zero(knobs, std_epsilon=1e-6))


def advantages(inputs: AdvantageInputs, knobs: GrpoKnobs) -> Tensor:
    """``[tokens]`` float32: every token of a sample carries the sample's advantage."""
    of_samples = F.group_relative_advantages(
        rewards=P.penalized_rewards(inputs, knobs), normalize_std=knobs.normalize_std, std_epsilon=knobs.std_epsilon
    )
    return of_samples[inputs.sample_ids]


SPEC = AlgorithmSpec(
    name="grpo",
    summary="advantages relative to the group, PPO clip, no critic",
    knobs=GrpoKnobs,
    needs=P.needs,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
)

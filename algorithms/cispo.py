"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped, detached importance weight.

The clip bounds how much a token counts; unlike PPO's it never takes a token's gradient away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CispoKnobs(P.PolicyGradientKnobs):
    """Values are documented in conf/algo."""

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0
    std_epsilon: float = 1e-6


def check(knobs: CispoKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    problems = P.group_problems(knobs)
    if not 0 < knobs.clip_low <= 1:
        problems.append(f"algo.clip_low={knobs.clip_low}: must lie in (0, 1]. CISPO uses 1, which is no lower bound.")
    P.refuse(problems + P.above_zero(knobs, clip_high=4.0, std_epsilon=1e-6))


def advantages(inputs: AdvantageInputs, knobs: CispoKnobs) -> Tensor:
    """``[tokens]`` float32: relative to the group, as GRPO's."""
    of_samples = F.group_relative_advantages(
        rewards=P.penalized_rewards(inputs, knobs), normalize_std=True, std_epsilon=knobs.std_epsilon
    )
    return of_samples[inputs.sample_ids]


def loss(inputs: LossInputs, knobs: CispoKnobs) -> LossOutputs:
    """REINFORCE, weighted."""
    policy = F.cispo_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, knobs),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=knobs.clip_low,
        clip_high=knobs.clip_high,
    )
    return P.outputs(policy, inputs, knobs)


SPEC = AlgorithmSpec(
    name="cispo",
    summary="REINFORCE with a clipped importance weight, every token keeps its gradient",
    knobs=CispoKnobs,
    needs=P.needs,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=P.denominator,
)

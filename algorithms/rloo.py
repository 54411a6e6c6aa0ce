"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other rewards as baseline.

A response is one action: its log-probs are summed, never averaged (``seq_mean_token_sum_norm`` with a length of 1). At
r = 1 the gradient of the clipped surrogate is REINFORCE's; the clip only holds what staleness does to the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RlooKnobs(P.ClipKnobs):
    """Values are documented in conf/algo."""

    name: str = "rloo"
    aggregation: str = "seq_mean_token_sum_norm"
    norm_length: float = 1.0
    kl_estimator: str = "k1"
    kl_placement: str = "reward"


def check(knobs: RlooKnobs) -> None:
    """Raises ValueError that lists every knob that makes no sense, with its fix."""
    P.refuse(P.group_problems(knobs) + P.clip_problems(knobs, usual="0.2 and 0.2 are usual."))


def advantages(inputs: AdvantageInputs, knobs: RlooKnobs) -> Tensor:
    """``[tokens]`` float32: the sample's reward minus the mean of the others'."""
    return F.leave_one_out_advantages(rewards=P.penalized_rewards(inputs, knobs))[inputs.sample_ids]


SPEC = AlgorithmSpec(
    name="rloo",
    summary="REINFORCE with a leave-one-out baseline",
    knobs=RlooKnobs,
    needs=P.needs,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
)

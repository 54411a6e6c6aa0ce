"""Dr. GRPO (arXiv 2503.20783): GRPO without two biases, division by the group's std and by the response length.

The advantage is r - mean. The sum over a response's tokens is divided by a constant, the maximum response length.
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
class DrGrpoConfig(P.CreditConfig, P.TokenClipConfig):
    """Holds the settings of Dr. GRPO. conf/algo documents the values."""

    name: str = "dr_grpo"
    aggregation: str = "seq_mean_token_sum_norm"


def check(config: DrGrpoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.baseline_problems(config) + P.credit_problems(config)
    P.refuse(problems + P.token_clip_problems(config, usual="Dr. GRPO uses 0.2 and 0.2."))


def _centred(rewards: Tensor) -> Tensor:
    return F.group_relative_advantages(rewards=rewards, normalize_std=False, std_epsilon=0.0)


def advantages(inputs: AdvantageInputs, config: DrGrpoConfig) -> Tensor:
    """Returns the rewards minus the mean of the compared episodes or turns, ``[tokens]`` float32."""
    return P.credited_advantages(inputs, config, _centred)


SPEC = AlgorithmSpec(
    name="dr_grpo",
    summary="GRPO without std and without length bias",
    config=DrGrpoConfig,
    requirements=P.credit_requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=P.normalize_weights,
)

"""Dr. GRPO (arXiv 2503.20783) is GRPO without its two biases, the group's std and the response's own length.

A = r - mean. Each response's sum is divided by one constant length, the maximum length of a response.
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
class DrGrpoConfig(P.TokenClipConfig):
    """Holds the settings of Dr. GRPO; conf/algo documents the values."""

    name: str = "dr_grpo"
    aggregation: str = "seq_mean_token_sum_norm"


def check(config: DrGrpoConfig) -> None:
    """Raises ValueError that lists every setting that makes no sense, with its fix."""
    P.refuse(P.baseline_problems(config) + P.token_clip_problems(config, usual="Dr. GRPO uses 0.2 and 0.2."))


def advantages(inputs: AdvantageInputs, config: DrGrpoConfig) -> Tensor:
    """Returns the sample's reward less its group's mean, ``[tokens]`` float32."""
    of_samples = F.group_relative_advantages(
        rewards=P.penalized_rewards(inputs, config), normalize_std=False, std_epsilon=0.0
    )
    return of_samples[inputs.sample_ids]


SPEC = AlgorithmSpec(
    name="dr_grpo",
    summary="GRPO without std and without length bias",
    config=DrGrpoConfig,
    requirements=P.requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=P.normalize_weights,
)

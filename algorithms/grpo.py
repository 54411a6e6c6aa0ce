"""GRPO (arXiv 2402.03300) has advantages relative to the group and PPO's clip, and no critic.

The presets use the aggregation and KL that most implementations ship: the token mean and no KL. The paper's objective
is the mean over samples of each sample's mean (eq. 3) with a KL coefficient of 0.04 (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec


@dataclass(frozen=True)
class GrpoConfig(P.GroupConfig, P.TokenClipConfig):
    """Holds the settings of GRPO, which name each choice that implementations make differently (see conf/algo)."""

    name: str = "grpo"


def check(config: GrpoConfig) -> None:
    """Raises ValueError that lists every setting that makes no sense, with its fix."""
    usual = "GRPO uses 0.2 and 0.2, DAPO 0.2 and 0.28."
    P.refuse(P.group_problems(config) + P.token_clip_problems(config, usual=usual))


SPEC = AlgorithmSpec(
    name="grpo",
    summary="advantages relative to the group, PPO clip, no critic",
    config=GrpoConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=P.group_advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)

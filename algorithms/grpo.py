"""GRPO (arXiv 2402.03300): advantages relative to the group, PPO's clip, no critic.

The presets use the defaults of most implementations: the token mean and no KL. The paper's objective is the mean over
samples of each sample's token mean (eq. 3), with a KL coefficient of 0.04 (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec


@dataclass(frozen=True)
class GrpoConfig(P.GroupConfig, P.TokenClipConfig):
    """Holds the settings of GRPO: one setting per choice that differs between implementations (see conf/algo)."""

    name: str = "grpo"


def check(config: GrpoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
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

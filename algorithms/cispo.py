"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped, detached importance weight.

The clip limits a token's weight. PPO's clip can remove a token's gradient; this clip never does. The paper has no lower
bound, and does not state the value of its tuned upper bound. ScaleRL (arXiv 2510.13786) uses a weight of at most 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs


@dataclass(frozen=True)
class CispoConfig(P.GroupConfig):
    """Holds the settings of CISPO. conf/algo documents the values."""

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0
    trust_region: str = "none"


def check(config: CispoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.group_problems(config)
    if not 0 < config.clip_low <= 1:
        problems.append(f"algo.clip_low={config.clip_low}: must lie in (0, 1]. CISPO uses 1, which is no lower bound.")
    problems += P.choice_problems("algo.trust_region", config.trust_region, F.CISPO_TRUST_REGIONS)
    P.refuse(problems + P.not_positive_problems(config, clip_high=4.0))


def loss(inputs: LossInputs, config: CispoConfig) -> LossOutputs:
    """Returns CISPO's loss with the terms that `policy_gradient.outputs` adds."""
    policy = F.cispo_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, config),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        trust_region=config.trust_region,
    )
    return P.outputs(policy, inputs, config)


SPEC = AlgorithmSpec(
    name="cispo",
    summary="REINFORCE with a clipped importance weight, every token keeps its gradient",
    config=CispoConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=P.group_advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)

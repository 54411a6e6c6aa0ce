"""CISPO (MiniMax-M1, arXiv 2506.13585) is REINFORCE with a clipped, detached importance weight.

The clip bounds a token's weight. Unlike PPO's clip it never removes a token's gradient. The paper has no lower bound
and a tuned upper bound whose value it does not state; a weight of at most 5 is ScaleRL's (arXiv 2510.13786).
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs


@dataclass(frozen=True)
class CispoConfig(P.GroupConfig):
    """Holds the settings of CISPO; conf/algo documents the values."""

    name: str = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0
    trust_region: str = "none"


def check(config: CispoConfig) -> None:
    """Raises ValueError that lists every setting that makes no sense, with its fix."""
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

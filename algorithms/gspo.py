"""GSPO (arXiv 2507.18071): one length-normalised ratio per sequence, clipped to a very narrow range.

The log-ratio of a sequence is a mean over tokens, far smaller than the log-ratio of a token. So PPO's clip of 0.2 would
never act.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs


@dataclass(frozen=True)
class GspoConfig(P.GroupConfig, P.ClipConfig):
    """Holds the settings of GSPO. conf/algo documents the values."""

    name: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: str = "seq_mean_token_mean"


def check(config: GspoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    P.refuse(P.group_problems(config) + P.clip_problems(config, usual="GSPO uses 3e-4 and 4e-4."))


def loss(inputs: LossInputs, config: GspoConfig) -> LossOutputs:
    """Returns the clipped surrogate of the sequence ratio with the terms that `policy_gradient.outputs` adds."""
    policy = F.gspo_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, config),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.num_samples,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    return P.outputs(policy, inputs, config)


SPEC = AlgorithmSpec(
    name="gspo",
    summary="one length-normalised ratio per sequence, clipped at 3e-4 / 4e-4",
    config=GspoConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=P.group_advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)

"""SAPO, Soft Adaptive Policy Optimization (arXiv 2511.20347): a soft gate of the ratio replaces the hard clip."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs


@dataclass(frozen=True)
class SapoConfig(P.GroupConfig):
    """Holds the settings of SAPO. conf/algo documents the values."""

    name: str = "sapo"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    aggregation: str = "seq_mean_token_mean"


def check(config: SapoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    P.refuse(P.group_problems(config) + P.not_positive_problems(config, tau_positive=1.0, tau_negative=1.05))


def loss(inputs: LossInputs, config: SapoConfig) -> LossOutputs:
    """Returns the soft-gated surrogate with the terms that `policy_gradient.outputs` adds."""
    policy = F.sapo_policy_loss(
        logprobs=inputs.logprobs,
        old_logprobs=P.old_logprobs(inputs, config),
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        tau_positive=config.tau_positive,
        tau_negative=config.tau_negative,
    )
    return P.outputs(policy, inputs, config)


SPEC = AlgorithmSpec(
    name="sapo",
    summary="a soft gate of the ratio instead of a clip",
    config=SapoConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=P.group_advantages,
    loss=loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)

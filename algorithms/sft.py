"""Supervised fine-tuning: the negative log-prob of the data's responses, as a mean over the tokens of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmConfig,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Requirements,
    StepTotals,
)

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("none", "dft")


@dataclass(frozen=True)
class SftConfig(AlgorithmConfig):
    """Holds the settings of supervised fine-tuning. conf/algo documents the values."""

    name: str = "sft"
    group_size: int = 1
    token_weight: str = "none"


def requirements(config: SftConfig) -> Requirements:
    """Returns the requirements: rows with demonstrations, and nothing that an engine or another role computes."""
    return Requirements(old_logprobs="rollout", whole_step=False, offline="demonstrations")


def check(config: SftConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    P.refuse(
        P.offline_problems(config, group_size=1) + P.choice_problems("algo.token_weight", config.token_weight, WEIGHTS)
    )


def advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Tensor:
    """Returns 1 for each token, ``[tokens]`` float32; the loss does not read advantages."""
    return inputs.loss_mask.float() * 0.0 + 1.0


def loss(inputs: LossInputs, config: SftConfig) -> LossOutputs:
    """Returns the sum of -log π over the trained tokens.

    With ``token_weight`` "dft" each token has the weight sg(π), where sg stops the gradient (DFT, arXiv 2508.05629).
    """
    surprisal = -inputs.logprobs.masked_fill(~inputs.loss_mask, 0.0)
    per_token = (-surprisal.detach()).exp() * surprisal if config.token_weight == "dft" else surprisal
    trained = inputs.of_trained(surprisal.detach())
    count = trained.new_tensor(float(len(trained)))
    return LossOutputs(
        loss_sum=per_token.sum(), per_token=per_token.detach(), metric_sums={"surprisal": (trained.sum(), count)}
    )


def denominator(totals: StepTotals, config: SftConfig) -> float:
    """Returns the number of trained tokens of the update."""
    return float(max(totals.tokens, 1))


SPEC = AlgorithmSpec(
    name="sft",
    summary="supervised fine-tuning on the responses in the data, without engines",
    config=SftConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=denominator,
)

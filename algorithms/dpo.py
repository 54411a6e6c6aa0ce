"""Direct preference optimization (arXiv 2305.18290): trains on pairs of a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from algorithms.sft import advantages
from relax_core.contracts.algorithm import (
    AlgorithmConfig,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Requirements,
    StepTotals,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DpoConfig(AlgorithmConfig):
    """Holds the settings of DPO. conf/algo documents the values."""

    name: str = "dpo"
    group_size: int = 2
    beta: float = 0.1
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False
    sft_coef: float = 0.0


def requirements(config: DpoConfig) -> Requirements:
    """Returns the requirements: rows with pairs, and the reference's log-probs."""
    return Requirements(old_logprobs="rollout", reference=True, whole_step=False, offline="pairs")


def check(config: DpoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.offline_problems(config, group_size=2)
    problems += P.choice_problems("algo.loss", config.loss, F.PREFERENCE_LOSSES)
    problems += P.not_positive_problems(config, beta=0.1)
    if config.sft_coef < 0:
        problems.append(f"algo.sft_coef={config.sft_coef}: must not be negative. Use 0 for no SFT term.")
    if not 0.0 <= config.label_smoothing < 0.5:
        problems.append(
            f"algo.label_smoothing={config.label_smoothing}: must be at least 0 and below 0.5, the share of pairs with "
            "swapped labels. Use 0."
        )
    elif config.label_smoothing > 0 and config.loss in ("ipo", "hinge"):
        problems.append(
            f"algo.label_smoothing={config.label_smoothing} with algo.loss={config.loss}: this loss has no label "
            "smoothing. Use algo.loss=sigmoid or robust, or 0."
        )
    if config.loss == "robust" and config.label_smoothing == 0:
        problems.append(
            "algo.loss=robust with algo.label_smoothing=0 equals algo.loss=sigmoid. Set the share of noise."
        )
    P.refuse(problems)


def loss(inputs: LossInputs, config: DpoConfig) -> LossOutputs:
    """Returns the sum over pairs of `F.preference_loss`, plus ``sft_coef`` times the chosen response's mean -log π.

    A response's log-ratio is the sum over its tokens. With ``length_normalized``, and for IPO, it is the mean. The SFT
    term is that of arXiv 2404.19733, eq. 1. A pair without trained tokens (mode.on_stale=mask) is not counted, because
    `denominator` does not count it.
    """
    assert inputs.reference_logprobs is not None, "requirements() requests a reference"
    assert inputs.num_samples % 2 == 0, "a micro-batch has whole pairs"
    log_ratios = inputs.logprobs - inputs.reference_logprobs
    reduce = F.sample_means if config.length_normalized or config.loss == "ipo" else F.sample_sums
    chosen, rejected = _of_pairs(reduce, log_ratios, inputs)
    per_pair = F.preference_loss(
        margins=chosen - rejected, beta=config.beta, kind=config.loss, label_smoothing=config.label_smoothing
    )
    trained = _of_pairs(F.sample_sums, inputs.loss_mask.to(chosen.dtype), inputs)
    counted = (trained[0] + trained[1] > 0).to(chosen.dtype)
    loss_sum = (counted * per_pair).sum()
    surprisal, _ = _of_pairs(F.sample_means, -inputs.logprobs, inputs)
    if config.sft_coef > 0:
        loss_sum = loss_sum + config.sft_coef * surprisal.sum()
    with_gradient = {
        "preference_accuracy": (chosen > rejected).to(chosen.dtype),
        "preference_margin": config.beta * (chosen - rejected),
        "chosen_reward": config.beta * chosen,
        "rejected_reward": config.beta * rejected,
        "chosen_surprisal": surprisal,
    }
    # A pair that is not counted adds 0 to each sum.
    return LossOutputs(
        loss_sum=loss_sum,
        metric_sums={name: (values.detach().sum(), counted.sum()) for name, values in with_gradient.items()},
    )


def _of_pairs(reduce: Callable[..., Tensor], per_token: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Returns the reduced values of the chosen and of the rejected samples, each ``[pairs]``."""
    values = reduce(
        per_token=per_token,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.num_samples,
    ).view(-1, 2)
    return values[:, 0], values[:, 1]


def denominator(totals: StepTotals, config: AlgorithmConfig) -> float:
    """Returns the number of pairs of the update."""
    return float(max(totals.groups, 1))


SPEC = AlgorithmSpec(
    name="dpo",
    summary="direct preference optimization on pairs in the data, without engines",
    config=DpoConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=denominator,
)

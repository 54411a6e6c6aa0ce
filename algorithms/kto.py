"""Kahneman-Tversky optimization (arXiv 2402.01306): trains on responses with a label, desirable or undesirable.

A group has two samples with the same prompt: the labelled response, and another row's response that is not trained. The
log-ratios of the untrained responses give the reference point z. z is one number per train step, it has no
gradient, and it is computed with the weights at the start of the step. These are the current weights, because `check`
allows one update per train step. `normalize` stores z in the advantages of the untrained sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from algorithms.dpo import denominator
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmConfig,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Requirements,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KtoConfig(AlgorithmConfig):
    """Holds the settings of KTO. conf/algo documents the values."""

    name: str = "kto"
    group_size: int = 2
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def requirements(config: KtoConfig) -> Requirements:
    """Returns the requirements: rows with labels, and log-probs of the step's initial weights and the reference."""
    return Requirements(old_logprobs="actor_fwd", reference=True, offline="labels")


def check(config: KtoConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.offline_problems(config, group_size=2)
    problems += P.not_positive_problems(config, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    problems += [
        f"algo.{key}={value} with algo=kto: the KL estimate is of the weights at the start of a train step, so a step "
        f"has one update. Use 1{fix}."
        for key, value, fix in (
            ("mini_batches", config.mini_batches, " and a smaller rollout.prompts_per_step"),
            ("epochs", config.epochs, " and run.epochs"),
        )
        if value > 1
    ]
    P.refuse(problems)


def advantages(inputs: AdvantageInputs, config: KtoConfig) -> Tensor:
    """Returns the label of the trained sample for its tokens, 1 or -1, and 0 for the untrained sample's tokens.

    The result is ``[tokens]`` float32.
    """
    import torch

    label = 1.0 if float(inputs.rewards[0]) > 0 else -1.0
    return torch.where(inputs.sample_ids == 0, label, 0.0).float()


def normalize(advantages: Sequence[Tensor], groups: Sequence[AdvantageInputs], config: KtoConfig) -> list[Tensor]:
    """Returns the advantages with z at the tokens of each untrained sample.

    z = max(0, mean of log π/π_ref over the untrained samples of the step) (arXiv 2402.01306). A sample's
    log-ratio is the sum over its tokens.
    """
    import torch

    log_ratios = []
    for group in groups:
        assert group.old_logprobs is not None and group.reference_logprobs is not None, "requirements() requests both"
        ratios = group.old_logprobs.double() - group.reference_logprobs.double()
        log_ratios.append(ratios[group.sample_ids == 1].sum())
    kl = torch.stack(log_ratios).mean().clamp(min=0.0).float()
    return [torch.where(group.sample_ids == 1, kl, own) for own, group in zip(advantages, groups, strict=True)]


def loss(inputs: LossInputs, config: KtoConfig) -> LossOutputs:
    """Returns the sum over groups of λ·(1 - σ(β·(r - z))) for label 1, and of λ·(1 - σ(β·(z - r))) for label -1.

    r is log π/π_ref of the trained sample, the sum over its tokens, β is ``beta``, and λ is ``desirable_weight`` or
    ``undesirable_weight`` (arXiv 2402.01306). A group without trained tokens (mode.on_stale=mask) is not
    counted, because `denominator` does not count it.
    """
    import torch

    assert inputs.reference_logprobs is not None, "requirements() requests a reference"
    assert inputs.num_samples % 2 == 0, "a micro-batch has both samples of a group"
    every = torch.ones_like(inputs.loss_mask)

    def of_groups(per_token: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
        """Returns the sums or the means over each sample's tokens in the mask, ``[groups, 2]``."""
        reduce = F.sample_means if mean else F.sample_sums
        return reduce(
            per_token=per_token, loss_mask=mask, sample_ids=inputs.sample_ids, num_samples=inputs.num_samples
        ).view(-1, 2)

    log_ratios = of_groups(inputs.logprobs - inputs.reference_logprobs, inputs.loss_mask)[:, 0]
    labels, kl = of_groups(inputs.advantages, every, mean=True).unbind(dim=1)
    counted = (of_groups(inputs.loss_mask.to(log_ratios.dtype), every)[:, 0] > 0).to(log_ratios.dtype)
    desirable = labels > 0
    signs = torch.where(desirable, 1.0, -1.0).to(log_ratios.dtype)
    weights = torch.where(desirable, config.desirable_weight, config.undesirable_weight).to(log_ratios.dtype)
    per_group = weights * torch.sigmoid(-config.beta * signs * (log_ratios - kl))
    rewards, good = config.beta * log_ratios.detach(), desirable.to(log_ratios.dtype)
    return LossOutputs(
        loss_sum=(counted * per_group).sum(),
        metric_sums={
            "kl": ((counted * kl).sum(), counted.sum()),
            "chosen_reward": ((counted * good * rewards).sum(), (counted * good).sum()),
            "rejected_reward": ((counted * (1.0 - good) * rewards).sum(), (counted * (1.0 - good)).sum()),
        },
    )


SPEC = AlgorithmSpec(
    name="kto",
    summary="Kahneman-Tversky optimization on labelled responses in the data, without engines",
    config=KtoConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=loss,
    denominator=denominator,
    normalize=normalize,
)

"""NaN and infinity in a rank's gradients and weights: whether there is one, in which tensor first, and in which words
that ends the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.step.step_sums import NotFinite, StepSums


def look_at_gradients(sums: StepSums, weights: HfWeights, chunks: Iterable[Any], *, rank: int) -> None:
    """Notes in ``sums`` where a gradient of this rank is not finite. ``chunks``: Megatron's wrappers."""
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    # NaN and infinity stay in a sum.
    if not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers):
        found = first_not_finite(weights, rank=rank)
        sums.broken_ranks, sums.not_finite = [rank], [] if found is None else [found]


def refuse_update(sums: StepSums, *, step: int) -> None:
    """Raises FloatingPointError where a gradient of any rank, or the loss, is not finite. ``sums``: of all ranks."""
    kept = "The weights are as they were before this step."
    if sums.broken_ranks:
        raise FloatingPointError(
            f"train step {step}: the gradient is not finite on rank(s) {sums.broken_ranks}"
            f"{_first_words(sums.not_finite)}; loss sum {sums.loss}. {kept}"
        )
    if not math.isfinite(sums.loss):
        raise FloatingPointError(
            f"train step {step}: the loss sum is {sums.loss}, though every gradient is finite. {kept}"
        )


def refuse_weights(parameters: Sequence[Tensor], weights: HfWeights, *, rank: int, step: int, lr: float) -> None:
    """Raises FloatingPointError where the update of ``step`` made weights of this rank that are not finite. Costs one
    pass over ``parameters``, which are all of them."""
    if torch.isfinite(torch.nn.utils.get_total_norm(parameters)):
        return
    found = first_not_finite(weights, rank=rank)  # else the norm of finite weights has overflowed
    if found is not None and found.weight:
        raise FloatingPointError(
            f"train step {step}: its update made weights that are not finite on rank {rank}; the first such tensor is "
            f"{found.name}. Go on from a checkpoint with less than optimizer.lr={lr:g}, which this step had."
        )


def first_not_finite(weights: HfWeights, *, rank: int) -> NotFinite | None:
    """The first of this rank's weights that is not finite; where all of them are, the first such gradient."""
    looks: tuple[tuple[Callable[[torch.nn.Parameter], Tensor], bool], ...] = (
        (torch.Tensor.detach, True),
        (_gradient, False),
    )
    for tensor_of, weight in looks:
        for place, name, tensor in weights.parts(tensor_of):
            if not torch.isfinite(tensor).all():
                return NotFinite(place=place, name=name, rank=rank, weight=weight)
    return None


def _gradient(parameter: Any) -> Tensor:
    gradient = parameter.main_grad  # of Megatron's wrapper
    assert isinstance(gradient, Tensor)
    return gradient


def _first_words(found: Sequence[NotFinite]) -> str:
    """The first tensor over all ranks. Weights come before gradients, as their cause."""
    if not found:
        return ""
    first = min(found, key=lambda one: (not one.weight, one.place, one.rank))
    whose = "the first tensor whose weights are not finite themselves" if first.weight else "the first such tensor"
    return f"; {whose} is {first.name}"

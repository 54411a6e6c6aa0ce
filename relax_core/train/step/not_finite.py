"""Finds NaN and infinity in a rank's gradients and weights and raises errors that name the first such tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.step.step_sums import NotFinite, StepSums


def check_gradients(sums: StepSums, weights: HfWeights, chunks: Iterable[Any], *, rank: int) -> None:
    """Records in ``sums`` whether a gradient of this rank is not finite; ``chunks`` are Megatron's wrappers."""
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    # NaN and infinity survive summation, so one sum checks a whole buffer.
    if not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers):
        found = first_not_finite(weights, rank=rank)
        sums.broken_ranks, sums.not_finite = [rank], [] if found is None else [found]


def refuse_update(sums: StepSums, *, step: int) -> None:
    """Raises FloatingPointError if the loss or a gradient of any rank is not finite; ``sums`` are over all ranks."""
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
    """Raises FloatingPointError if the update of train step ``step`` made weights of this rank not finite.

    ``parameters`` are all parameters of the rank. The check costs one pass over them.
    """
    if torch.isfinite(torch.nn.utils.get_total_norm(parameters)):
        return
    found = first_not_finite(weights, rank=rank)  # If the norm only overflowed, no weight is found.
    if found is not None and found.weight:
        raise FloatingPointError(
            f"train step {step}: its update made weights that are not finite on rank {rank}; the first such tensor is "
            f"{found.name}. Resume from a checkpoint with optimizer.lr below {lr:g}, which this step used."
        )


def first_not_finite(weights: HfWeights, *, rank: int) -> NotFinite | None:
    """Returns the first weight of this rank that is not finite, or else the first such gradient, or else None."""
    tensors: tuple[tuple[Callable[[torch.nn.Parameter], Tensor], bool], ...] = (
        (torch.Tensor.detach, True),
        (_gradient, False),
    )
    for tensor_of, weight in tensors:
        for index, name, tensor in weights.parts(tensor_of):
            if not torch.isfinite(tensor).all():
                return NotFinite(index=index, name=name, rank=rank, weight=weight)
    return None


def _gradient(parameter: Any) -> Tensor:
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)  # A frozen parameter has no gradient.
    gradient = parameter.main_grad  # Megatron's wrapper sets it.
    assert isinstance(gradient, Tensor)
    return gradient


def _first_words(found: Sequence[NotFinite]) -> str:
    """Describes the first such tensor over all ranks; weights come before gradients, because they cause them."""
    if not found:
        return ""
    first = min(found, key=lambda one: (not one.weight, one.index, one.rank))
    whose = "the first tensor whose weights are not finite themselves" if first.weight else "the first such tensor"
    return f"; {whose} is {first.name}"

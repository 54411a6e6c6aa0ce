"""Adds the sums of an update over micro-batches and then over the ranks, and refuses an update that is not finite.

An update is refused by errors that name the first tensor with NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.contracts.algorithm import LossOutputs, StepTotals
from relax_core.contracts.tree import TokenTree
from relax_core.train.hf.hf_weights import HfWeights


class NotFinite(msgspec.Struct, frozen=True, kw_only=True):
    """Names the first tensor of a rank that is not finite.

    ``name`` is its Hugging Face name and ``index`` its index in the family's map. ``weight`` is True if the weight
    itself is not finite, and False if only its gradient is not.
    """

    rank: int
    name: str
    index: int
    weight: bool


class StepSums(msgspec.Struct, kw_only=True):
    """Holds counts and sums as Python floats (float64).

    ``samples`` and ``groups`` count those with at least one trained token. ``rows`` counts computed token rows; a row
    that several micro-batches or ranks compute counts once for each. ``algorithm`` maps a metric's name to (sum,
    count). ``broken_ranks`` are the ranks with a gradient that is not finite, and ``not_finite`` names the first such
    tensor of each.
    """

    tokens: int = 0
    samples: int = 0
    groups: int = 0
    rows: int = 0
    loss: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    gap_max: float = 0.0
    algorithm: dict[str, tuple[float, float]] = {}
    broken_ranks: list[int] = []
    not_finite: list[NotFinite] = []

    def add(self, other: StepSums) -> None:
        """Adds ``other`` to these sums."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.groups += other.groups
        self.rows += other.rows
        self.loss += other.loss
        self.gap_sum += other.gap_sum
        self.gap_tokens += other.gap_tokens
        self.gap_max = max(self.gap_max, other.gap_max)
        self.broken_ranks += other.broken_ranks
        self.not_finite += other.not_finite
        for name, (total, count) in other.algorithm.items():
            before = self.algorithm.get(name, (0.0, 0.0))
            self.algorithm[name] = (before[0] + total, before[1] + count)


def add_over_ranks(sums: StepSums, group: dist.ProcessGroup) -> StepSums:
    """Returns the sums over all ranks of a gloo group, added in rank order, so that every rank has the same bits.

    Ranks may know different metrics: a rank without groups in this step knows none.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return sums
    payload = torch.frombuffer(bytearray(msgspec.msgpack.encode(sums)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = payload
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    total = StepSums()
    for part, size in zip(gathered, sizes, strict=True):
        total.add(msgspec.msgpack.decode(part[: int(size)].numpy().tobytes(), type=StepSums))
    return total


def micro_batch_totals(trees: Sequence[TokenTree]) -> StepTotals:
    """Counts what is trained of a micro-batch; a row that two episodes share counts once for each."""
    trained = [tree.trained_episodes() for tree in trees]
    return StepTotals(
        tokens=sum(int(np.count_nonzero(tree.loss_mask[tree.tokens[1]])) for tree in trees),
        samples=sum(int(np.count_nonzero(one)) for one in trained),
        groups=sum(tree.counts_group and bool(one.any()) for tree, one in zip(trees, trained, strict=True)),
    )


def counted_sums(trees: Sequence[TokenTree]) -> StepSums:
    """Returns what trees that are not computed add to the update's sums."""
    totals = micro_batch_totals(trees)
    return StepSums(tokens=totals.tokens, samples=totals.samples, groups=totals.groups)


def micro_batch_sums(trees: Sequence[TokenTree], outputs: LossOutputs) -> StepSums:
    """Returns what a micro-batch adds to the update's sums, except for the log-prob gap to the engine."""
    sums = counted_sums(trees)
    sums.rows = sum(tree.computed_rows for tree in trees)
    sums.loss = float(outputs.loss_sum.detach())
    sums.algorithm = {name: (float(total), float(count)) for name, (total, count) in outputs.metric_sums.items()}
    return sums


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

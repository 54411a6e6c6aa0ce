"""Adds the sums of an update over micro-batches and then over the replicas of the model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from relax_core.contracts.algorithm import LossOutputs, StepTotals
from relax_core.contracts.tree import TokenTree


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

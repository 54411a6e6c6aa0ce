"""The sums of a train step, added over micro-batches and then over data-parallel ranks."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist


class StepSums(msgspec.Struct, kw_only=True):
    """Counts and sums, Python floats (float64). ``samples``, ``groups``: those with a trained token at least.
    ``algorithm``: metric name → (sum, count). ``broken_ranks``: those whose gradient is not finite."""

    tokens: int = 0
    samples: int = 0
    groups: int = 0
    loss: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    gap_max: float = 0.0
    algorithm: dict[str, tuple[float, float]] = {}
    broken_ranks: list[int] = []

    def add(self, other: StepSums) -> None:
        self.tokens += other.tokens
        self.samples += other.samples
        self.groups += other.groups
        self.loss += other.loss
        self.gap_sum += other.gap_sum
        self.gap_tokens += other.gap_tokens
        self.gap_max = max(self.gap_max, other.gap_max)
        self.broken_ranks += other.broken_ranks
        for name, (total, count) in other.algorithm.items():
            before = self.algorithm.get(name, (0.0, 0.0))
            self.algorithm[name] = (before[0] + total, before[1] + count)


def add_over_ranks(sums: StepSums, group: dist.ProcessGroup) -> StepSums:
    """The step's sums over all ranks of a gloo group, added in rank order, so that every rank has the same bits.

    Ranks may know different metrics: one without groups in this step knows none.
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

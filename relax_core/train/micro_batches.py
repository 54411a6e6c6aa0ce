"""Which groups go together: micro-batches by a token budget, in order of issue, and their split over ranks.

Groups arrive one lease after the other; a micro-batch closes as soon as the next group would not fit. So its content
depends on the order of groups alone, never on when they came.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.train import TrainGroup


class MicroBatcher:
    """Collects groups into micro-batches of at most ``budget_tokens`` packed token rows (a larger group goes alone)."""

    def __init__(self, budget_tokens: int) -> None:
        self._budget = budget_tokens
        self._open: list[TrainGroup] = []
        self._tokens = 0

    def add(self, groups: Sequence[TrainGroup]) -> list[list[TrainGroup]]:
        """Adds groups; returns the micro-batches that are now full."""
        full = []
        for group in groups:
            if self._open and self._tokens + group.packed_tokens > self._budget:
                full.append(self.flush())
            self._open.append(group)
            self._tokens += group.packed_tokens
        return full

    def flush(self) -> list[TrainGroup]:
        """The open micro-batch, which may be empty."""
        batch, self._open, self._tokens = self._open, [], 0
        return batch


def split_over_ranks(groups: Sequence[TrainGroup], ranks: int) -> list[list[TrainGroup]]:
    """Groups of one micro-batch for each data-parallel rank, balanced by packed tokens: longest first, each to the
    rank with the least so far; a rank may get none. Within a rank the order of issue stays."""
    if ranks == 1:
        return [list(groups)]
    load = [0] * ranks
    places: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(groups)), key=lambda i: (-groups[i].packed_tokens, i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += groups[place].packed_tokens
        places[rank].append(place)
    return [[groups[place] for place in sorted(mine)] for mine in places]

"""Which groups go together: micro-batches by a token budget, in order of issue, and their split over ranks.

Groups arrive one lease after the other; a micro-batch closes as soon as the next group would not fit. So its content
depends on the order of groups alone, never on when they came.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.train import TrainGroup


class MicroBatcher:
    """Collects groups into micro-batches: split over ``ranks`` data-parallel ranks, each has at most ``budget_tokens``
    packed token rows, or a single group that is larger."""

    def __init__(self, budget_tokens: int, *, ranks: int = 1) -> None:
        self._budget, self._ranks = budget_tokens, ranks
        self._open: list[TrainGroup] = []

    def add(self, groups: Sequence[TrainGroup]) -> list[list[TrainGroup]]:
        """Adds groups; returns the micro-batches that are now full."""
        full = []
        for group in groups:
            if self._open and not self._fits([*self._open, group]):
                full.append(self.flush())
            self._open.append(group)
        return full

    def flush(self) -> list[TrainGroup]:
        """The open micro-batch, which may be empty."""
        batch, self._open = self._open, []
        return batch

    def _fits(self, groups: Sequence[TrainGroup]) -> bool:
        shares = split_over_ranks(groups, self._ranks)
        return all(len(share) <= 1 or sum(one.packed_tokens for one in share) <= self._budget for share in shares)


def split_over_ranks(groups: Sequence[TrainGroup], ranks: int) -> list[list[TrainGroup]]:
    """Groups of one micro-batch for each data-parallel rank, balanced by packed tokens: longest first, each to the
    rank with the least so far; a rank may get none. Within a rank the order of issue stays."""
    if ranks == 1:
        return [list(groups)]
    sizes = [group.packed_tokens for group in groups]
    load = [0] * ranks
    places: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(groups)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += sizes[place]
        places[rank].append(place)
    return [[groups[place] for place in sorted(mine)] for mine in places]

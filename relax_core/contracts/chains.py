"""Finds the chains of a token tree. A chain is a maximal sequence of rows without a fork between its rows.

A tree has far fewer chains than rows, so computing paths and positions on chains is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Chains(NamedTuple):
    """Holds the chains of a tree, int64 ``[runs]`` each.

    In a chain, each row after the first is the only child of the previous row.

    A chain has the rows ``start`` to ``stop`` (exclusive). ``end`` is the row after the chain's subtree. ``parent`` is
    the index of the parent chain, -1 at a root; the last row of the parent chain is the parent of this chain's first
    row. ``depth`` is the position of the chain's first row in the path from the root.
    """

    start: np.ndarray
    stop: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the index of each row's chain, int64 ``[rows]``."""
        return np.searchsorted(self.start, rows, side="right") - 1

    def positions(self) -> np.ndarray:
        """Returns the position of each row in the row's path, int64 ``[rows]``."""
        sizes = self.stop - self.start
        return np.arange(int(sizes.sum())) + np.repeat(self.depth - self.start, sizes)

    def parents(self) -> np.ndarray:
        """Returns the parent row of each row, int64 ``[rows]``; -1 at a root."""
        rows = np.arange(-1, int(self.stop[-1]) - 1)
        rows[self.start] = np.where(self.parent < 0, -1, self.stop[self.parent] - 1)
        return rows


def chains_of(end: np.ndarray) -> Chains:
    """Returns the chains of a forest from its array ``end``, ``[rows]`` with at least one row.

    Raises ValueError if the subtrees do not nest.
    """
    rows = len(end)
    starts = np.flatnonzero(np.concatenate(([True], end[1:] != end[:-1])))
    stops = np.append(starts[1:], rows)
    start, stop, last = starts.tolist(), stops.tolist(), end[starts].tolist()
    parent, depth, above = list[int](), list[int](), list[int]()
    for run, (first, behind, subtree) in enumerate(zip(start, stop, last, strict=True)):
        while above and last[above[-1]] <= first:
            above.pop()
        its = above[-1] if above else -1
        if not behind <= subtree <= (rows if its < 0 else last[its]):
            raise ValueError(
                f"end[{first}]={subtree} does not nest: a subtree must end inside the subtree of its parent"
            )
        parent.append(its)
        depth.append(0 if its < 0 else depth[its] + stop[its] - start[its])
        above.append(run)
    return Chains(starts, stops, np.asarray(last), np.asarray(parent), np.asarray(depth))


def concatenate_chains(forests: Sequence[Chains]) -> Chains:
    """Concatenates the chains of several forests, for a concatenation of the forests' rows."""
    if len(forests) == 1:
        return forests[0]
    rows = np.cumsum([0, *(runs.stop[-1] for runs in forests[:-1])])
    before = np.cumsum([0, *(len(runs.start) for runs in forests[:-1])])
    counts = [len(runs.start) for runs in forests]
    start, stop, end, parent, depth = (np.concatenate(column) for column in zip(*forests, strict=True))
    shift = np.repeat(rows, counts)
    parent = np.where(parent < 0, -1, parent + np.repeat(before, counts))
    return Chains(start + shift, stop + shift, end + shift, parent, depth)


def rows_of_episodes(
    runs: Chains, leaves: Sequence[Sequence[int]], wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows on the paths of each episode that ``wanted`` (bool ``[rows]``) selects.

    ``leaves`` has one or more leaves for each episode. The result is (episode numbers, rows), both int64, episode by
    episode and with ascending rows. A row appears once for each episode that contains it.
    """
    several = any(len(own) > 1 for own in leaves)
    row = np.array([leaf for own in leaves for leaf in own], dtype=np.int64)
    episode = np.repeat(np.arange(len(leaves)), [len(own) for own in leaves])
    some = np.add.reduceat(wanted, runs.start, dtype=np.int64) > 0
    run, stop = runs.of_rows(row), row + 1
    pieces = []
    while len(run):
        here = some[run]
        pieces.append(np.stack([episode[here], runs.start[run[here]], stop[here]]))
        parent = runs.parent[run]
        inner = parent >= 0
        episode, run = episode[inner], parent[inner]
        stop = runs.stop[run]
    numbers, first, behind = np.concatenate(pieces, axis=1)
    order = np.lexsort((first, numbers))
    numbers, first, sizes = numbers[order], first[order], (behind - first)[order]
    rows = np.arange(int(sizes.sum())) + np.repeat(first - np.cumsum(sizes) + sizes, sizes)
    of_rows = np.repeat(numbers, sizes)
    if several:
        both = np.unique(of_rows * len(wanted) + rows)
        of_rows, rows = np.divmod(both, len(wanted))
    chosen = wanted[rows]
    return (of_rows, rows) if chosen.all() else (of_rows[chosen], rows[chosen])

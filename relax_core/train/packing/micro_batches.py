"""Groups trees into micro-batches under a budget of rows, in order of issue, and splits them over ranks.

Trees arrive lease by lease, and a micro-batch closes as soon as the next tree does not fit. Its content therefore
depends on the order of the trees and not on their arrival times. A tree that is larger than the budget is split between
episodes, and each piece repeats the rows that its episodes share with others. An episode is never split, because
sequence-level ratios and lengths are computed over whole episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relax_core.contracts.tree import TokenTree

REPEATED = "repeated"
ROW = "row"
Piece = tuple[int, int, int]  # The index of a tree, and its first and last (exclusive) episode.
Paths = list[dict[int, int]]  # For each episode of a tree: run on its path → rows computed for that run.


class MicroBatcher:
    """Collects trees into micro-batches and splits trees that are larger than one.

    In a micro-batch each of the ``ranks`` data-parallel ranks has at most ``budget_rows`` computed rows, or one episode
    that is larger.
    """

    def __init__(self, budget_rows: int, *, ranks: int = 1) -> None:
        self._budget, self._ranks = budget_rows, ranks
        self._open: list[TokenTree] = []
        self._open_paths: list[Paths] = []  # Filled only if there are several ranks.

    def add(self, trees: Sequence[TokenTree]) -> list[list[TokenTree]]:
        """Adds trees; returns the micro-batches that are now full."""
        full = []
        for tree in trees:
            paths = [] if self._ranks == 1 else [_paths(tree)]
            if self._open and not self._fits([*self._open, tree], [*self._open_paths, *paths]):
                full.append(self.flush())
            if self._open or self._fits([tree], paths):
                self._open.append(tree)
                self._open_paths += paths
                continue
            bins = _pieces_of_bins([tree], _fill_bins([_paths(tree)], self._budget))
            for first in range(0, len(bins), self._ranks):
                full.append([piece for one in bins[first : first + self._ranks] for piece in one])
            self._open = full.pop()  # The last piece may leave room for more trees.
            self._open_paths = [] if self._ranks == 1 else [_paths(piece) for piece in self._open]
        return full

    def flush(self) -> list[TokenTree]:
        """Returns the open micro-batch, which may be empty, and starts a new one."""
        batch, self._open, self._open_paths = self._open, [], []
        return batch

    def _fits(self, trees: Sequence[TokenTree], paths: Sequence[Paths]) -> bool:
        if self._ranks == 1:
            single = len(trees) == 1 and len(trees[0].episodes) == 1
            return single or sum(tree.computed_rows for tree in trees) <= self._budget
        return len(_fill_bins(paths, self._budget)) <= self._ranks


def with_row_numbers(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the trees with the extra ``row``, which numbers the rows of all trees from 0.

    Pieces keep the extra, so results for the rows of a piece can be written back to the rows of its tree.
    """
    before = np.cumsum([0, *(tree.rows for tree in trees)]).tolist()
    return [
        tree.with_extras(**{ROW: np.arange(first, first + tree.rows)})
        for tree, first in zip(trees, before, strict=False)
    ]


def split_over_ranks(trees: Sequence[TokenTree], ranks: int) -> list[list[TokenTree]]:
    """Splits one micro-batch into the episodes of each data-parallel rank, in order of issue.

    The split minimizes the rows of the rank that has most. A rank may get no episodes.
    """
    if ranks == 1:
        return [list(trees)]
    paths = [_paths(tree) for tree in trees]
    rows = sum(tree.computed_rows for tree in trees)
    low, high = -(-rows // ranks), rows
    while low < high:
        middle = (low + high) // 2
        if len(_fill_bins(paths, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shares = _pieces_of_bins(trees, _fill_bins(paths, high))
    return [*shares, *([] for _ in range(ranks - len(shares)))]


def _fill_bins(trees: Sequence[Paths], capacity: int) -> list[list[Piece]]:
    """Fills bins in order; a bin has at most ``capacity`` rows, or a single episode that has more."""
    bins: list[list[Piece]] = []
    rows = capacity + 1  # The first episode opens a bin.
    for index, paths in enumerate(trees):
        seen: set[int] = set()
        first = 0
        for episode, path in enumerate(paths):
            more = sum(size for run, size in path.items() if run not in seen)
            if rows + more > capacity and (rows or not bins):
                if episode > first:
                    bins[-1].append((index, first, episode))
                bins.append([])
                first, rows, seen = episode, 0, set()
                more = sum(path.values())
            rows += more
            seen.update(path)
        bins[-1].append((index, first, len(paths)))
    return bins


def _paths(tree: TokenTree) -> Paths:
    """Returns for each episode the runs on its paths and the rows that are computed for each run."""
    runs = tree.runs
    sizes = (runs.stop - runs.start - (runs.stop == runs.end)).tolist()
    parent = runs.parent.tolist()
    paths: Paths = []
    for one in tree.episodes:
        path: dict[int, int] = {}
        for run in runs.of_rows(np.array(one.leaves)).tolist():
            while run >= 0 and run not in path:
                path[run] = sizes[run]
                run = parent[run]
        paths.append(path)
    return paths


def _pieces_of_bins(trees: Sequence[TokenTree], bins: Sequence[Sequence[Piece]]) -> list[list[TokenTree]]:
    """Returns the trees of each bin; the first piece of a tree that has a trained row counts as the group."""
    counted: set[int] = set()
    made: list[list[TokenTree]] = []
    for pieces in bins:
        made.append([])
        for index, first, stop in pieces:
            piece = piece_of(trees[index], first, stop)
            counts = trees[index].counts_group and index not in counted and bool(piece.loss_mask.any())
            if counts and piece is not trees[index]:
                counted.add(index)
                piece = replace(piece, counts_group=True)
            made[-1].append(piece)
    return made


def piece_of(tree: TokenTree, first: int, stop: int) -> TokenTree:
    """Returns a tree with episodes ``first`` to ``stop`` (exclusive) of ``tree``, or ``tree`` itself if that is all.

    The extra ``repeated`` is True at rows that earlier pieces also have, so that each row is counted once.
    """
    if stop - first == len(tree.episodes):
        return tree
    repeated = tree.extras.get(REPEATED, np.zeros(tree.rows, dtype=bool)).copy()
    if first:
        repeated[tree.rows_of(range(first))] = True
    return tree.with_extras(**{REPEATED: repeated}).take(range(first, stop))

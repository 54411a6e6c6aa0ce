"""Which trees go together: micro-batches by a budget of rows, in order of issue, and their split over ranks.

Trees arrive one lease after the other; a micro-batch closes as soon as the next tree would not fit. So its content
depends on the order of trees alone, never on when they came. A tree that is larger than the budget is cut by episodes,
each piece with the rows that its episodes share. An episode is never cut: sequence-level ratios and lengths are its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relax_core.contracts.tree import TokenTree

REPEATED = "repeated"
ROW = "row"
Piece = tuple[int, int, int]  # place of a tree, and its episodes from, to (exclusive)
Paths = list[dict[int, int]]  # of each episode of a tree


class MicroBatcher:
    """Collects trees into micro-batches: split over ``ranks`` data-parallel ranks, each has at most ``budget_rows``
    computed rows, or a single episode that is larger."""

    def __init__(self, budget_rows: int, *, ranks: int = 1) -> None:
        self._budget, self._ranks = budget_rows, ranks
        self._open: list[TokenTree] = []
        self._open_paths: list[Paths] = []  # of each open tree, where there are several ranks

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
            bins = _made([tree], _filled([_paths(tree)], self._budget))
            for first in range(0, len(bins), self._ranks):
                full.append([piece for one in bins[first : first + self._ranks] for piece in one])
            self._open = full.pop()  # the last may have room for more
            self._open_paths = [] if self._ranks == 1 else [_paths(piece) for piece in self._open]
        return full

    def flush(self) -> list[TokenTree]:
        """The open micro-batch, which may be empty."""
        batch, self._open, self._open_paths = self._open, [], []
        return batch

    def _fits(self, trees: Sequence[TokenTree], paths: Sequence[Paths]) -> bool:
        if self._ranks == 1:
            single = len(trees) == 1 and len(trees[0].episodes) == 1
            return single or sum(tree.computed_rows for tree in trees) <= self._budget
        return len(_filled(paths, self._budget)) <= self._ranks


def with_row_numbers(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """The trees with the extra ``row``: the place of each row among the rows of all of them. Pieces keep it, so that
    what is computed of a piece finds its way back."""
    before = np.cumsum([0, *(tree.rows for tree in trees)]).tolist()
    return [
        tree.with_extras(**{ROW: np.arange(first, first + tree.rows)})
        for tree, first in zip(trees, before, strict=False)
    ]


def split_over_ranks(trees: Sequence[TokenTree], ranks: int) -> list[list[TokenTree]]:
    """The episodes of one micro-batch for each data-parallel rank, in order of issue, cut so that the rank with the
    most rows has as few as can be. A rank may get none."""
    if ranks == 1:
        return [list(trees)]
    paths = [_paths(tree) for tree in trees]
    rows = sum(tree.computed_rows for tree in trees)
    low, high = -(-rows // ranks), rows
    while low < high:
        middle = (low + high) // 2
        if len(_filled(paths, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shares = _made(trees, _filled(paths, high))
    return [*shares, *([] for _ in range(ranks - len(shares)))]


def _filled(trees: Sequence[Paths], capacity: int) -> list[list[Piece]]:
    """Bins of at most ``capacity`` rows, or of a single episode that has more, filled in order."""
    bins: list[list[Piece]] = []
    rows = capacity + 1  # so that the first episode opens a bin
    for place, paths in enumerate(trees):
        seen: set[int] = set()
        first = 0
        for episode, path in enumerate(paths):
            more = sum(size for run, size in path.items() if run not in seen)
            if rows + more > capacity and (rows or not bins):
                if episode > first:
                    bins[-1].append((place, first, episode))
                bins.append([])
                first, rows, seen = episode, 0, set()
                more = sum(path.values())
            rows += more
            seen.update(path)
        bins[-1].append((place, first, len(paths)))
    return bins


def _paths(tree: TokenTree) -> Paths:
    """Of each episode the runs on its paths, and the rows that are computed of each."""
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


def _made(trees: Sequence[TokenTree], bins: Sequence[Sequence[Piece]]) -> list[list[TokenTree]]:
    """The trees of each bin. Of a tree in several pieces the first with a trained row counts as the group."""
    counted: set[int] = set()
    made: list[list[TokenTree]] = []
    for pieces in bins:
        made.append([])
        for place, first, behind in pieces:
            piece = piece_of(trees[place], first, behind)
            counts = trees[place].counts_group and place not in counted and bool(piece.loss_mask.any())
            if counts and piece is not trees[place]:
                counted.add(place)
                piece = replace(piece, counts_group=True)
            made[-1].append(piece)
    return made


def piece_of(tree: TokenTree, first: int, behind: int) -> TokenTree:
    """Episodes ``first`` to ``behind`` (exclusive) of a tree; all of them are the tree. The extra ``repeated`` is True
    at rows that the pieces in front of it have too, so that whoever counts rows counts each once."""
    if behind - first == len(tree.episodes):
        return tree
    repeated = tree.extras.get(REPEATED, np.zeros(tree.rows, dtype=bool)).copy()
    if first:
        repeated[tree.rows_of(range(first))] = True
    return tree.with_extras(**{REPEATED: repeated}).take(range(first, behind))

"""Tree packing: token trees become one stream of rows, without pads.

The last token of a branch predicts nothing, so it is not in the stream. This is on the step path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_core.contracts.chains import together
from relax_core.contracts.tree import TokenTree

MASKLESS_SAVES_PAIRS = 2**17  # of token rows: what attention without a mask must save, on a CPU, to be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """Some trees in their common stream of ``rows`` token rows: ``end`` says who sees whom, as in a `TokenTree`.

    The output layer is computed for the ``chosen`` sampled rows alone (of every tree its row numbers, int64,
    ascending), each at the row in front of it, which predicts it. ``token_positions`` says which of them each token
    is, -1 where it was not chosen; None where they are the same, one to one.
    """

    token_ids: np.ndarray  # int64 [rows]
    end: np.ndarray  # int64 [rows]
    chosen: Sequence[np.ndarray]  # one array a tree
    positions: np.ndarray  # int64 [rows], place of the row in its own path
    predicting_rows: np.ndarray  # int64 [chosen], the row whose output predicts each chosen one
    targets: np.ndarray  # int64 [chosen], their token ids
    token_positions: np.ndarray | None  # int64 [tokens]
    sample_ids: np.ndarray  # int64 [tokens], the episode of each token
    num_samples: int


def pack_tree(trees: Sequence[TokenTree], *, trained_only: bool = False) -> TreeLayout:
    """Lays out trees, one or more, as one stream. ``trained_only``: choose the trained rows and not all sampled ones,
    where there is any."""
    sizes = np.array([tree.rows for tree in trees])
    before = (np.cumsum(sizes) - sizes).tolist()
    end = np.concatenate([tree.end + first for tree, first in zip(trees, before, strict=True)])
    inner = np.concatenate([tree.computed for tree in trees])
    place = np.concatenate(([0], np.cumsum(inner)))  # in the stream: stream rows in front of each row
    token_ids = np.concatenate([tree.token_ids for tree in trees]).astype(np.int64)
    runs = together([tree.runs for tree in trees])
    chosen_of = [tree.sampled for tree in trees]
    if trained_only and any(tree.loss_mask.any() for tree in trees):
        chosen_of = [np.flatnonzero(tree.loss_mask) for tree in trees]
    chosen = np.concatenate([rows + first for rows, first in zip(chosen_of, before, strict=True)])
    token_rows = np.concatenate([tree.tokens[1] + first for tree, first in zip(trees, before, strict=True)])
    episodes = np.array([len(tree.episodes) for tree in trees])
    episodes_before = (np.cumsum(episodes) - episodes).tolist()
    return TreeLayout(
        token_ids=token_ids[inner],
        end=place[end[inner]],
        chosen=chosen_of,
        positions=runs.positions()[inner],
        predicting_rows=place[runs.parents()[chosen]],
        targets=token_ids[chosen],
        token_positions=_places(chosen, token_rows),
        sample_ids=np.concatenate([t.tokens[0] + first for t, first in zip(trees, episodes_before, strict=True)]),
        num_samples=int(episodes.sum()),
    )


def _places(chosen: np.ndarray, token_rows: np.ndarray) -> np.ndarray | None:
    """Where each token's row stands in the ascending ``chosen``, -1 where it does not; None where they are one."""
    if np.array_equal(chosen, token_rows):
        return None
    places = np.minimum(np.searchsorted(chosen, token_rows), len(chosen) - 1)
    return np.where(chosen[places] == token_rows, places, -1)


def tree_starts(end: np.ndarray) -> np.ndarray:
    """The row that each tree of a stream begins with, ascending, int64 ``[trees]``; ``end`` int64 ``[rows]``."""
    reach = np.maximum.accumulate(end)
    return np.append(0, np.flatnonzero(reach[:-1] == np.arange(1, len(end))) + 1)

"""Computes rotary positions with three axes (time, height, width) from a tree and its media items.

A text token advances all three positions by 1. If an item starts at position p, its rows have the positions p +
offsets, and the token after the item has position p + advance. A branch continues from its parent row. Positions are
computed from the tree, so they are not stored or sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_core.contracts.chains import Chains
from relax_core.contracts.media import Media


def rotary_positions(runs: Chains, media: Sequence[Media]) -> np.ndarray:
    """Returns the rotary positions of a tree's rows, ``[3, rows]``, as int64.

    If an item has fractional offsets, the result is float64.

    All rows of an item must be in one chain.
    """
    rows = int(runs.stop[-1])
    fractional = any(medium.item.fractional for medium in media)
    advances = np.ones(rows, dtype=np.float64 if fractional else np.int64)
    for medium in media:
        advances[medium.start : medium.end] = 0
        advances[medium.end - 1] = medium.item.advance
    sums = _path_sums(runs, advances)
    positions = np.repeat((sums - advances)[None], 3, axis=0)
    for medium in media:
        positions[:, medium.start : medium.end] = positions[:, medium.start, None] + medium.item.rotary_offsets
    return positions


def rotary_of_sequence(length: int, media: Sequence[Media]) -> tuple[np.ndarray, float]:
    """Returns the rotary positions of a sequence, ``[3, length]``, and the position of the token after it."""
    whole = Chains(*(np.array([number]) for number in (0, length, length, -1, 0)))
    moved = sum(medium.item.advance - (medium.end - medium.start) for medium in media)
    return rotary_positions(whole, media), length + moved


def _path_sums(runs: Chains, values: np.ndarray) -> np.ndarray:
    """Returns for each row the sum of ``values`` over the rows of its path, including the row itself."""
    sums = np.cumsum(values)
    before = sums - values
    shift = -before[runs.start]  # this starts a new sum at each chain
    for chain, parent in enumerate(runs.parent.tolist()):
        if parent >= 0:  # parents come before their children
            last = int(runs.stop[parent]) - 1
            shift[chain] += sums[last] + shift[parent]
    return sums + np.repeat(shift, runs.stop - runs.start)

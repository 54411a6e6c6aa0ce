"""Plans how a gated delta net goes through a tree-packed stream: level by level, each segment from its parent's state.

A segment is a chain of rows in which each row but the first is the only child of the row before it. Its state begins
as that of its parent behind the parent's last row, and as zeros at the root of a tree. All segments of one level, over
all trees of the stream, are computed together. The convolution reads the rows above a row on its own path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.trees.chains import chains_of
from relax_core.families.delta_rule import CHUNK_ROWS, Segments


@dataclass(frozen=True, slots=True)
class Level:
    """Holds the segments of one level: their rows in the stream, int64 ``[rows]``, one segment after the other.

    ``lengths`` are those of the segments. ``parents`` int64 ``[segments]`` are their parents among the segments of the
    level above, or None at the roots.
    """

    rows: Tensor
    lengths: tuple[int, ...]
    parents: Tensor | None
    segments: Segments


@dataclass(frozen=True, slots=True)
class SegmentLevels:
    """Holds the levels of a stream of ``rows`` rows, and the rows that its convolution reads.

    ``above`` int64 ``[kernel - 1, rows]`` has the row that stands k + 1 rows above each row on its path, or the number
    of rows if its path is shorter. ``row_places`` int64 ``[rows]`` is each row's place when the levels' rows follow
    each other.
    """

    levels: tuple[Level, ...]
    above: Tensor
    row_places: Tensor

    @staticmethod
    def of(
        end: np.ndarray, *, kernel: int, chunk_rows: int | None = None, device: torch.device | str = "cpu"
    ) -> SegmentLevels:
        """Plans a stream whose row k is visible to row q iff k <= q < ``end[k]``, int64 ``[rows]``.

        Chunks have ``chunk_rows`` rows, by default `CHUNK_ROWS`.
        """
        chunk_rows = chunk_rows or CHUNK_ROWS
        chains, count = chains_of(end), len(end)
        of_chain = np.zeros(len(chains.start), dtype=np.int64)
        for chain, parent in enumerate(chains.parent.tolist()):
            of_chain[chain] = 0 if parent < 0 else of_chain[parent] + 1
        levels: list[Level] = []
        number = np.zeros(len(chains.start), dtype=np.int64)  # of each chain among those of its level
        for level in range(int(of_chain.max()) + 1):
            mine = np.flatnonzero(of_chain == level)
            number[mine] = np.arange(len(mine))
            start, lengths = chains.start[mine], (chains.stop - chains.start)[mine]
            rows = np.repeat(start - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
            parents = torch.from_numpy(number[chains.parent[mine]]).to(device) if level else None
            sizes = tuple(lengths.tolist())
            segments = Segments.of(sizes, chunk_rows=chunk_rows, device=device)
            levels.append(Level(torch.from_numpy(rows).to(device), sizes, parents, segments))
        parent_rows = np.append(chains.parents(), -1)  # that of no row is no row
        above = np.empty((kernel - 1, count), dtype=np.int64)
        found = np.arange(count)
        for one in above:
            found = parent_rows[found]
            one[:] = np.where(found < 0, count, found)
        order = torch.cat([one.rows for one in levels])
        places = torch.empty_like(order)
        places[order] = torch.arange(count, device=order.device)
        return SegmentLevels(tuple(levels), torch.from_numpy(above).to(device), places)

    def convolved(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns the causal convolution of ``rows`` ``[rows, channels]`` along each path, of the same shape.

        ``weight`` is ``[channels, kernel]``; its last column belongs to the row itself.
        """
        with_zero = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        output = rows * weight[:, -1]
        for distance, above in enumerate(self.above, start=2):
            output = output + with_zero.index_select(0, above) * weight[:, -distance]
        return output

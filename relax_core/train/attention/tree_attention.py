"""A packed stream as this rank computes it, and the attention over it: a row sees the rows of its own path alone.

Attention reads of a layout only ``end``. On a GPU it is FlexAttention over blocks (flex_attention.py), on a CPU causal
runs without a mask where that is cheaper (branch_attention.py), else one masked call (`MaskedGrid`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from relax_core.train.attention.branch_attention import BranchPlan
from relax_core.train.attention.flex_attention import FlexBlocks
from relax_core.train.model.routing_replay import OWN_CHOICE, RouterRows
from relax_core.train.packing.tree_packing import TreeLayout, tree_starts
from relax_core.train.parallel.context_parallel import WHOLE, RowCut, TokenCut


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How rows stand on a grid, one line a tree: ``row_of_position`` int64 ``[lines * width]`` (a pad copies some row),
    ``position_of_row`` int64 ``[rows]``; both None where the stream is the grid."""

    lines: int
    width: int
    row_of_position: Tensor | None
    position_of_row: Tensor | None

    def place(self, rows: Tensor) -> Tensor:
        """``[rows, heads, dim]`` → ``[lines, heads, width, dim]``."""
        placed = rows if self.row_of_position is None else rows[self.row_of_position]
        return placed.view(self.lines, self.width, *rows.shape[1:]).transpose(1, 2)

    def take(self, placed: Tensor) -> Tensor:
        """``[lines, heads, width, dim]`` → ``[rows, heads * dim]``."""
        rows = placed.transpose(1, 2).reshape(self.lines * self.width, -1)
        return rows if self.position_of_row is None else rows[self.position_of_row]


class Attention(Protocol):
    """Attention over the rows of one micro-batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention; ``query`` ``[query rows, heads, dim]``, ``key`` and ``value`` ``[key rows, groups,
        dim]``. Returns ``[query rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedGrid:
    """Attention by one call with a mask, for what is small and for context parallelism on a CPU. Its memory is the
    square of the largest tree, times the trees."""

    queries: Grid
    keys: Grid
    mask: Tensor  # [lines, 1, query width, key width], 0 or -inf

    @staticmethod
    def of(end: np.ndarray, *, pads: int, device: torch.device, dtype: torch.dtype) -> MaskedGrid:
        """Of a whole stream with ``pads`` rows behind it; ``end``: int64 ``[rows]``."""
        places = _Places.of(end)
        row_of_position, position_of_row = None, None
        if pads or places.ends.size > len(end):
            rows = np.zeros(places.ends.size, dtype=np.int64)  # a pad copies row 0
            rows[places.of_row] = np.arange(len(end))
            row_of_position, position_of_row = _put(rows, device), _put(_pad(places.of_row, pads), device)
        lines, width = places.ends.shape
        grid = Grid(lines=lines, width=width, row_of_position=row_of_position, position_of_row=position_of_row)
        columns = torch.arange(width, device=device).expand(lines, width)
        return MaskedGrid(queries=grid, keys=grid, mask=_mask(columns, _put(places.ends, device), dtype))

    @staticmethod
    def of_rank(end: np.ndarray, cut: RowCut, *, padded: int, device: torch.device, dtype: torch.dtype) -> MaskedGrid:
        """A context-parallel rank's rows as queries, on a grid of the trees that they belong to, against all rows of
        these trees; the keys come rank after rank."""
        places, stream = _Places.of(end), len(end)
        width = places.ends.shape[1]
        mine = cut.rows_of_rank(padded)
        real = mine[mine < stream]
        if not len(real):
            real = np.zeros(1, dtype=np.int64)  # a rank of pads alone has a place to copy from, too
        pads = len(mine) - len(real)
        trees, line = np.unique(places.of_row[real] // width, return_inverse=True)
        # Rows come in the stream's order, so a line's rows are neighbours.
        in_line = np.bincount(line)
        slot = np.arange(len(real)) - np.repeat(np.cumsum(in_line) - in_line, in_line)
        query_width = int(in_line.max())
        query_positions = line * query_width + slot

        query_rows = np.zeros(len(trees) * query_width, dtype=np.int64)
        columns = query_rows.copy()  # a pad sees what the first row of its tree sees
        query_rows[query_positions] = np.arange(len(real))  # real rows come before the pads
        columns[query_positions] = places.of_row[real] % width
        key_rows = np.zeros(places.ends.shape, dtype=np.int64)
        key_rows.reshape(-1)[places.of_row] = cut.gathered_order(padded)[:stream]
        return MaskedGrid(
            queries=Grid(
                lines=len(trees),
                width=query_width,
                row_of_position=_put(query_rows, device),
                position_of_row=_put(_pad(query_positions, pads), device),
            ),
            keys=Grid(
                lines=len(trees),
                width=width,
                row_of_position=_put(key_rows[trees].reshape(-1), device),
                position_of_row=None,
            ),
            mask=_mask(_put(columns.reshape(len(trees), -1), device), _put(places.ends[trees], device), dtype),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """See `Attention`."""
        output = F.scaled_dot_product_attention(
            self.queries.place(query),
            self.keys.place(key),
            self.keys.place(value),
            attn_mask=self.mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.queries.take(output)


@dataclass(frozen=True, slots=True)
class _Places:
    """A stream on a grid of one line a tree, as wide as the largest: ``of_row`` int64 ``[rows]``, the flat place of
    each row; ``ends`` int64 ``[trees, width]``, the column behind each row's subtree. A pad ends with its line, so that
    it sees itself, which keeps its softmax finite; no row sees it."""

    of_row: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(end: np.ndarray) -> _Places:
        starts = tree_starts(end)
        sizes = np.diff(starts, append=len(end))
        width = int(sizes.max())
        line = np.repeat(np.arange(len(starts)), sizes)
        of_row = np.arange(len(end)) - starts[line] + line * width
        ends = np.full((len(starts), width), width, dtype=np.int64)
        ends.reshape(-1)[of_row] = end - starts[line]
        return _Places(of_row, ends)


def _mask(query_columns: Tensor, key_ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Which place sees which, 0 or -inf ``[lines, 1, query width, key width]``; ``query_columns`` ``[lines, query
    width]``, ``key_ends`` ``[lines, key width]``."""
    columns = query_columns[:, :, None]
    sees = columns < key_ends[:, None, :]
    sees &= torch.arange(key_ends.shape[1], device=columns.device) <= columns
    mask = torch.full(sees.shape, float("-inf"), dtype=dtype, device=sees.device)
    return mask.masked_fill_(sees, 0.0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """A tree layout as tensors on the device, with what attention needs: this rank's rows of it.

    Rows are padded at the end (`RowCut`); a pad is a row like any other, but nothing reads what comes of it. Without
    context parallelism the local tokens are all tokens.
    """

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    predicting_rows: Tensor  # int64 [local tokens]
    targets: Tensor  # int64 [local tokens]
    max_position: int
    padded_rows: int  # of the whole stream
    attention: Attention  # its keys are the rows of all context-parallel ranks, one rank's after the other's
    cut: RowCut = WHOLE
    tokens: TokenCut | None = None  # None: without context parallelism
    routers: RouterRows = OWN_CHOICE  # of a mixture of experts

    @staticmethod
    def of(
        layout: TreeLayout, *, device: torch.device, dtype: torch.dtype, cut: RowCut = WHOLE, rows: int = 0
    ) -> TreeBatch:
        """Moves this rank's part of a layout to the device. ``rows``: pad the stream to so many rows at least."""
        stream = len(layout.token_ids)
        padded = cut.padded(max(rows, stream))
        mine, own_tokens, tokens = cut.rows_of_rank(padded), slice(None), None
        predicting_rows = layout.predicting_rows
        if cut.ranks > 1:
            owners = cut.owners(layout.predicting_rows, padded)
            tokens = TokenCut.of(owners, cut, device)
            own_tokens = owners == cut.rank
            predicting_rows = np.searchsorted(mine, layout.predicting_rows[own_tokens])
        return TreeBatch(
            token_ids=_put(_pad(layout.token_ids, padded - stream)[mine], device),
            positions=_put(_pad(layout.positions, padded - stream)[mine], device),
            predicting_rows=_put(predicting_rows, device),
            targets=_put(layout.targets[own_tokens], device),
            max_position=int(layout.positions.max()),
            padded_rows=padded,
            attention=attention_over(layout.end, cut, padded=padded, device=device, dtype=dtype),
            cut=cut,
            tokens=tokens,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention of this rank's rows; ``query`` ``[rows, heads, dim]``, ``key`` and ``value``
        ``[rows, groups, dim]``.

        Returns ``[rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim).
        """
        if self.cut.group is not None:
            both = torch.cat([key, value], dim=-1)
            # Its backward pass sums the ranks' gradients and gives each rank those of its own rows.
            gathered = gather_from_sequence_parallel_region(both, group=self.cut.group)
            key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        return self.attention.attend(query, key, value, scale=scale)


def attention_over(end: np.ndarray, cut: RowCut, *, padded: int, device: torch.device, dtype: torch.dtype) -> Attention:
    """The way that is taken for a stream of ``padded`` rows, of which the first have an ``end``: int64 ``[rows]``."""
    if device.type == "cuda":
        return FlexBlocks.of(end, cut, padded=padded, device=device)
    if cut.ranks > 1:
        return MaskedGrid.of_rank(end, cut, padded=padded, device=device, dtype=dtype)
    plan = BranchPlan.of(end, dtype=dtype)
    return MaskedGrid.of(end, pads=padded - len(end), device=device, dtype=dtype) if plan is None else plan


def _put(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _pad(array: np.ndarray, pads: int) -> np.ndarray:
    return np.pad(array, (0, pads)) if pads else array

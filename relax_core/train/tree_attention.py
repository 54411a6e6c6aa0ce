"""Attention over a tree-packed stream: every branch sees its prompt and itself, never a sibling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from relax_core.train.branch_attention import BranchPlan
from relax_core.train.router_replay import OWN_CHOICE, RouterRows
from relax_core.train.row_cut import WHOLE, RowCut, TokenCut
from relax_core.train.tree import TreeLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How rows stand on a grid, one line a group: ``row_of_place`` int64 ``[lines * width]`` (a pad copies some row),
    ``place_of_row`` int64 ``[rows]``; both None where the stream is the grid."""

    lines: int
    width: int
    row_of_place: Tensor | None
    place_of_row: Tensor | None

    def place(self, rows: Tensor) -> Tensor:
        """``[rows, heads, dim]`` → ``[lines, heads, width, dim]``."""
        placed = rows if self.row_of_place is None else rows[self.row_of_place]
        return placed.view(self.lines, self.width, *rows.shape[1:]).transpose(1, 2)

    def take(self, placed: Tensor) -> Tensor:
        """``[lines, heads, width, dim]`` → ``[rows, heads * dim]``."""
        rows = placed.transpose(1, 2).reshape(self.lines * self.width, -1)
        return rows if self.place_of_row is None else rows[self.place_of_row]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """A tree layout as tensors on the device, with what attention needs: this rank's rows of it.

    Rows are padded at the end (`RowCut`); a pad is a row like any other, but nothing reads what comes of it. Without
    context parallelism ``queries`` and ``keys`` are the same grid, and the local tokens are all tokens.
    """

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    predicting_rows: Tensor  # int64 [local tokens]
    targets: Tensor  # int64 [local tokens]
    max_position: int
    padded_rows: int  # of the whole stream
    queries: Grid
    keys: Grid  # its rows are those of all context-parallel ranks, one rank's after the other's
    mask: Tensor | None  # [lines, 1, query width, key width], 0 or -inf, in the model's dtype
    plan: BranchPlan | None = None  # what attends without a mask, where that is cheaper
    cut: RowCut = WHOLE
    tokens: TokenCut | None = None  # None: without context parallelism
    routers: RouterRows = OWN_CHOICE  # of a mixture of experts

    @staticmethod
    def of(
        layout: TreeLayout, *, device: torch.device, dtype: torch.dtype, cut: RowCut = WHOLE, rows: int = 0
    ) -> TreeBatch:
        """Moves this rank's part of a layout to the device. ``rows``: pad the stream to so many rows at least."""
        padded = cut.padded(max(rows, len(layout.token_ids)))
        if cut.ranks > 1:
            return _context_parallel(layout, cut, padded=padded, device=device, dtype=dtype)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        pads = padded - len(layout.token_ids)
        lines, width = layout.branches.shape
        row_of_place, place_of_row = None, None
        if pads or not layout.fills_grid:
            places = np.zeros(lines * width, dtype=np.int64)  # a pad copies row 0
            places[layout.grid_places] = np.arange(len(layout.grid_places))
            row_of_place, place_of_row = put(places), put(_pad(layout.grid_places, pads))
        grid = Grid(lines=lines, width=width, row_of_place=row_of_place, place_of_row=place_of_row)
        branches = put(layout.branches)
        plan = BranchPlan.of(layout, dtype=dtype) if device.type == "cpu" else None
        return TreeBatch(
            token_ids=put(_pad(layout.token_ids, pads)),
            positions=put(_pad(layout.positions, pads)),
            predicting_rows=put(layout.predicting_rows),
            targets=put(layout.targets),
            max_position=int(layout.positions.max()),
            padded_rows=padded,
            queries=grid,
            keys=grid,
            mask=_mask(branches, branches, dtype) if plan is None else None,
            plan=plan,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention of this rank's rows; ``query`` ``[rows, heads, dim]``, ``key`` and ``value``
        ``[rows, groups, dim]``.

        Returns ``[rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim).
        """
        if self.plan is not None:
            return self.plan.attend(query, key, value, scale=scale)
        if self.cut.group is not None:
            both = torch.cat([key, value], dim=-1)
            # Its backward pass sums the ranks' gradients and gives each rank those of its own rows.
            gathered = gather_from_sequence_parallel_region(both, group=self.cut.group)
            key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        output = F.scaled_dot_product_attention(
            self.queries.place(query),
            self.keys.place(key),
            self.keys.place(value),
            attn_mask=self.mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.queries.take(output)


def _mask(
    query_branches: Tensor, key_branches: Tensor, dtype: torch.dtype, *, query_columns: Tensor | None = None
) -> Tensor:
    """Which place sees which, 0 or -inf ``[lines, 1, query width, key width]``, from the branches ``[lines, width]`` of
    queries and keys. ``query_columns``: places of the queries on their lines, where they are not 0, 1, …

    Places of a line come prompt first and each branch in order, so "not later in the line" is causality. Pads (-1)
    see the prompt as far as their column, which keeps their softmax finite; nothing reads them.
    """
    sees = query_branches[:, :, None] == key_branches[:, None, :]
    sees |= (key_branches == 0)[:, None, :]
    if query_columns is None:
        sees.tril_()
    else:
        sees &= torch.arange(sees.shape[2], device=sees.device) <= query_columns[:, :, None]
    mask = torch.full(sees.shape, float("-inf"), dtype=dtype, device=sees.device)
    return mask.masked_fill_(sees, 0.0)[:, None]


def _pad(array: np.ndarray, pads: int) -> np.ndarray:
    return np.pad(array, (0, pads)) if pads else array


def _context_parallel(
    layout: TreeLayout, cut: RowCut, *, padded: int, device: torch.device, dtype: torch.dtype
) -> TreeBatch:
    """This rank's zig-zag rows as queries, on a grid of the groups that they belong to, against all rows of these."""

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    stream, width = len(layout.token_ids), layout.branches.shape[1]
    mine = cut.rows_of_rank(padded)
    real = mine[mine < stream]
    if not len(real):
        real = np.zeros(1, dtype=np.int64)  # a rank of pads alone has a place to copy from, too
    groups, line = np.unique(layout.grid_places[real] // width, return_inverse=True)
    # Rows come in the stream's order, so a line's rows are neighbours.
    in_line = np.bincount(line)
    slot = np.arange(len(real)) - np.repeat(np.cumsum(in_line) - in_line, in_line)
    query_width = int(in_line.max())
    places = line * query_width + slot

    query_rows = np.zeros(len(groups) * query_width, dtype=np.int64)
    query_columns, query_branches = query_rows.copy(), np.full(len(query_rows), -1, dtype=np.int32)
    query_rows[places] = np.arange(len(real))  # real rows come before the pads
    query_columns[places] = layout.grid_places[real] % width
    query_branches[places] = layout.branches.reshape(-1)[layout.grid_places[real]]
    key_rows = np.zeros(layout.branches.size, dtype=np.int64)
    key_rows[layout.grid_places] = cut.gathered_order(padded)[:stream]

    owners = cut.owners(layout.predicting_rows, padded)
    tokens = TokenCut.of(owners, cut, device)
    own_tokens = owners == cut.rank
    lines = len(groups)
    pads = len(mine) - len(real)
    return TreeBatch(
        token_ids=put(_pad(layout.token_ids, padded - stream)[mine]),
        positions=put(_pad(layout.positions, padded - stream)[mine]),
        predicting_rows=put(np.searchsorted(mine, layout.predicting_rows[own_tokens])),
        targets=put(layout.targets[own_tokens]),
        max_position=int(layout.positions.max()),
        padded_rows=padded,
        queries=Grid(
            lines=lines, width=query_width, row_of_place=put(query_rows), place_of_row=put(_pad(places, pads))
        ),
        keys=Grid(
            lines=lines,
            width=width,
            row_of_place=put(key_rows.reshape(layout.branches.shape)[groups].reshape(-1)),
            place_of_row=None,
        ),
        mask=_mask(
            put(query_branches).view(lines, query_width),
            put(layout.branches[groups]),
            dtype,
            query_columns=put(query_columns).view(lines, query_width),
        ),
        cut=cut,
        tokens=tokens,
    )

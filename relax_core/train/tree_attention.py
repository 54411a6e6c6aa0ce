"""Attention over a tree-packed stream: every branch sees its prompt and itself, never a sibling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.train.tree import TreeLayout


def _branch_mask(branches: Tensor) -> Tensor:
    """Which place sees which, bool ``[groups, width, width]``, from branches ``[groups, width]``.

    Places of a line come prompt first and each branch in order, so "not later in the line" is causality. Pads (-1)
    see the prompt and themselves, which keeps their softmax finite; nothing reads them.
    """
    width = branches.shape[1]
    same_branch = branches[:, :, None] == branches[:, None, :]
    sees = same_branch | (branches == 0)[:, None, :]
    return sees & torch.ones(width, width, dtype=torch.bool, device=branches.device).tril()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """A tree layout as tensors on the device, with what attention needs."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    predicting_rows: Tensor  # int64 [tokens]
    targets: Tensor  # int64 [tokens]
    max_position: int
    groups: int
    width: int
    row_of_place: Tensor | None  # int64 [groups * width]; None: the stream is the grid
    place_of_row: Tensor | None  # int64 [rows]
    mask: Tensor  # [groups, 1, width, width], 0 or -inf, in the model's dtype

    @staticmethod
    def of(layout: TreeLayout, *, device: torch.device, dtype: torch.dtype) -> TreeBatch:
        """Moves a layout to the device."""

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        groups, width = layout.branches.shape
        row_of_place, place_of_row = None, None
        if not layout.fills_grid:
            rows = np.zeros(groups * width, dtype=np.int64)  # a pad copies row 0
            rows[layout.grid_places] = np.arange(len(layout.grid_places))
            row_of_place, place_of_row = put(rows), put(layout.grid_places)
        mask = torch.zeros(groups, 1, width, width, dtype=dtype, device=device)
        mask.masked_fill_(~_branch_mask(put(layout.branches))[:, None], float("-inf"))
        return TreeBatch(
            token_ids=put(layout.token_ids),
            positions=put(layout.positions),
            predicting_rows=put(layout.predicting_rows),
            targets=put(layout.targets),
            max_position=int(layout.positions.max()),
            groups=groups,
            width=width,
            row_of_place=row_of_place,
            place_of_row=place_of_row,
            mask=mask,
        )

    def _grid(self, rows: Tensor) -> Tensor:
        """``[rows, heads, dim]`` → ``[groups, heads, width, dim]``."""
        placed = rows if self.row_of_place is None else rows[self.row_of_place]
        return placed.view(self.groups, self.width, *rows.shape[1:]).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention; ``query`` ``[rows, heads, dim]``, ``key`` and ``value`` ``[rows, groups, dim]``.

        Returns ``[rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim).
        """
        output = F.scaled_dot_product_attention(
            self._grid(query),
            self._grid(key),
            self._grid(value),
            attn_mask=self.mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        rows = output.transpose(1, 2).reshape(self.groups * self.width, -1)
        return rows if self.place_of_row is None else rows[self.place_of_row]

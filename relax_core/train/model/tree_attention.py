"""Prepares this rank's rows of a packed stream and their attention; a row attends only to rows on its path.

The attention plan depends only on ``end`` of a layout. A CPU uses causal runs without a mask if they are cheaper
(branch_attention.py), otherwise one masked call (`MaskedGrid`). A GPU uses FlexAttention, which is planned in blocks
without a mask.

A row q sees a row k if and only if k <= q < end[k]. FlexAttention works on blocks of 128 queries and 128 keys. It skips
a block if no query sees a key. It computes a block without the rule if every query sees every key. In all other blocks
it applies the rule to every pair. The plan uses only the least and the greatest row and end of each block and takes a
few bytes per block. torch's `create_block_mask` would apply the rule to every pair of rows.

The FlexAttention path has not run on a GPU yet. On a CPU, tests compare the rule and the blocks with torch's
`create_block_mask`, and the graphs that torch captures with a dense mask, forward and backward. The GPU kernels that
torch compiles are not tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from relax_core.contracts.family import DeltaNet
from relax_core.contracts.tree import TokenTree
from relax_core.train.context_parallel import WHOLE, RowSharding, TokenSharding
from relax_core.train.device import attention_dtype, training_device
from relax_core.train.micro_batches import TreeLayout, tree_starts
from relax_core.train.model.branch_attention import BranchPlan
from relax_core.train.model.delta_net import SegmentLevels
from relax_core.train.model.media_features import MediaInputs
from relax_core.train.model.moe import OWN_CHOICE, RouterRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


BLOCK = 128  # The number of query rows and of key rows of a block.


@dataclass(frozen=True, slots=True)
class FlexBlocks:
    """Holds the blocks to compute and the visibility rule for pairs of rows."""

    mask: BlockMask

    @staticmethod
    def of(end: np.ndarray, sharding: RowSharding, *, padded: int, device: torch.device) -> FlexBlocks:
        """Plans the attention of this rank's rows to all ranks' rows, in rank order.

        The padded stream has ``padded`` rows.

        ``end`` is int64 ``[rows]``. Each pad is a separate tree.
        """
        ends = np.append(end, np.arange(len(end), padded) + 1)
        key_rows = np.argsort(sharding.gathered_order(padded))
        return FlexBlocks(_block_mask(sharding.rows_of_rank(padded), key_rows, ends[key_rows], device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Computes grouped-query attention; see `Attention.attend`."""
        by_heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = _kernel()(*by_heads, block_mask=self.mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        assert isinstance(output, Tensor)
        return output[0].transpose(0, 1).flatten(1)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Returns FlexAttention compiled to one kernel; uncompiled FlexAttention keeps all scores in memory.

    With `fullgraph` torch raises an error instead of falling back to the uncompiled function. Without CUDA it returns
    `dense_attention`, which reads the same blocks, because torch has no FlexAttention with a gradient there.
    """
    if not training_device().cuda:
        return dense_attention
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Computes the result of FlexAttention with a dense mask, made from the listed blocks and their rule.

    ``query`` is ``[1, heads, rows, dim]``, key and value are ``[1, groups, rows, dim]``.
    """
    queries, keys = (torch.arange(length, device=query.device) for length in (query.shape[2], key.shape[2]))
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    rule = block_mask.mask_mod(zero, zero, queries[:, None], keys[None])
    counts, order = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    assert counts is not None and order is not None, "FlexBlocks lists whole blocks"
    whole = _blocks_of(counts, order)
    partial = _blocks_of(block_mask.kv_num_blocks, block_mask.kv_indices)
    block_of = (queries // BLOCK)[:, None], (keys // BLOCK)[None]
    mask = whole[block_of] | (partial[block_of] & rule)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def _blocks_of(counts: Tensor, order: Tensor) -> Tensor:
    """Returns the listed blocks as bool ``[query blocks, key blocks]``; `_listed` describes the arguments."""
    listed = torch.arange(order.shape[-1], device=order.device)[None] < counts[0, 0][:, None]
    return torch.zeros_like(listed).scatter(1, order[0, 0].to(torch.int64), listed)


def _block_mask(query_rows: np.ndarray, key_rows: np.ndarray, key_ends: np.ndarray, device: torch.device) -> BlockMask:
    """Returns the mask of blocks.

    ``query_rows`` int64 ``[query rows]`` and ``key_rows`` int64 ``[key rows]`` are row numbers in the stream.
    ``key_ends`` int64 ``[key rows]`` is the row after each key's subtree.
    """
    from torch.nn.attention.flex_attention import BlockMask

    query_of, key_of, end_of = (
        torch.from_numpy(rows.astype(np.int32)).to(device) for rows in (query_rows, key_rows, key_ends)
    )

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query_of[query]
        return (key_of[key] <= row) & (row < end_of[key])

    some, every = _blocks(query_rows, key_rows, key_ends)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every, device),
        *_listed(every, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(query_rows), len(key_rows)),
    )


def _blocks(query_rows: np.ndarray, key_rows: np.ndarray, key_ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the blocks where some query may see some key, and the blocks where every query sees every key.

    Both arrays are bool ``[query blocks, key blocks]``. The first array is exact if the rows of each block are
    adjacent.
    """
    first_query, last_query = _least(query_rows)[:, None], _greatest(query_rows)[:, None]
    some = (_least(key_rows) <= last_query) & (first_query < _greatest(key_ends))
    every = (_greatest(key_rows) <= first_query) & (last_query < _least(key_ends))
    every[len(query_rows) // BLOCK :] = every[:, len(key_rows) // BLOCK :] = False
    return some, every


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns each query block's number of key blocks to compute, and the key blocks with these blocks first.

    The results are int32 ``[1, 1, query blocks]`` and int32 ``[1, 1, query blocks, key blocks]``.
    """
    counts = blocks.sum(axis=1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


def _least(rows: np.ndarray) -> np.ndarray:
    return np.minimum.reduceat(rows, np.arange(0, len(rows), BLOCK))


def _greatest(rows: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(rows, np.arange(0, len(rows), BLOCK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Maps stream rows to a grid with one line for each tree.

    ``row_of_position`` is int64 ``[lines * width]``; a pad copies some row. ``position_of_row`` is int64 ``[rows]``.
    Both are None if stream and grid have the same order.
    """

    lines: int
    width: int
    row_of_position: Tensor | None
    position_of_row: Tensor | None

    def to_grid(self, rows: Tensor) -> Tensor:
        """Copies ``[rows, heads, dim]`` onto the grid, ``[lines, heads, width, dim]``."""
        flat = rows if self.row_of_position is None else rows[self.row_of_position]
        return flat.view(self.lines, self.width, *rows.shape[1:]).transpose(1, 2)

    def from_grid(self, grid: Tensor) -> Tensor:
        """Copies ``[lines, heads, width, dim]`` back to ``[rows, heads * dim]``."""
        rows = grid.transpose(1, 2).reshape(self.lines * self.width, -1)
        return rows if self.position_of_row is None else rows[self.position_of_row]


class Attention(Protocol):
    """Computes attention over the rows of one micro-batch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Computes grouped-query attention and returns ``[query rows, heads * dim]``.

        ``query`` is ``[query rows, heads, dim]``; ``key`` and ``value`` are ``[key rows, groups, dim]``. If ``scale``
        is None it is 1 / sqrt(dim).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedGrid:
    """Computes attention in one call with a mask, for small streams on a CPU.

    It needs memory for the squared length of the largest tree, times the number of trees.
    """

    queries: Grid
    keys: Grid
    mask: Tensor  # [lines, 1, query width, key width], 0 or -inf

    @staticmethod
    def of(end: np.ndarray, *, pads: int, device: torch.device, dtype: torch.dtype) -> MaskedGrid:
        """Builds the grid of a whole stream with ``pads`` rows after it; ``end`` is int64 ``[rows]``."""
        layout = _GridLayout.of(end)
        row_of_position, position_of_row = None, None
        if pads or layout.ends.size > len(end):
            rows = np.zeros(layout.ends.size, dtype=np.int64)  # a pad copies row 0
            rows[layout.position] = np.arange(len(end))
            row_of_position, position_of_row = _put(rows, device), _put(_pad(layout.position, pads), device)
        lines, width = layout.ends.shape
        grid = Grid(lines=lines, width=width, row_of_position=row_of_position, position_of_row=position_of_row)
        columns = torch.arange(width, device=device).expand(lines, width)
        return MaskedGrid(queries=grid, keys=grid, mask=_mask(columns, _put(layout.ends, device), dtype))

    @staticmethod
    def of_rank(
        end: np.ndarray, sharding: RowSharding, *, padded: int, device: torch.device, dtype: torch.dtype
    ) -> MaskedGrid:
        """Builds the grid of a context-parallel rank: its rows as queries against all rows of the same trees.

        Each query is on the line of its tree. The keys are in rank order.
        """
        layout, stream = _GridLayout.of(end), len(end)
        width = layout.ends.shape[1]
        mine = sharding.rows_of_rank(padded)
        real = mine[mine < stream]
        if not len(real):
            real = np.zeros(1, dtype=np.int64)  # a rank with only pads copies row 0
        pads = len(mine) - len(real)
        trees, line = np.unique(layout.position[real] // width, return_inverse=True)
        # Rows are in stream order, so the rows of a line are adjacent.
        in_line = np.bincount(line)
        column = np.arange(len(real)) - np.repeat(np.cumsum(in_line) - in_line, in_line)
        query_width = int(in_line.max())
        query_positions = line * query_width + column

        query_rows = np.zeros(len(trees) * query_width, dtype=np.int64)
        columns = query_rows.copy()  # A pad sees the same keys as the first row of its tree.
        query_rows[query_positions] = np.arange(len(real))  # real rows come before the pads
        columns[query_positions] = layout.position[real] % width
        key_rows = np.zeros(layout.ends.shape, dtype=np.int64)
        key_rows.reshape(-1)[layout.position] = sharding.gathered_order(padded)[:stream]
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
            mask=_mask(_put(columns.reshape(len(trees), -1), device), _put(layout.ends[trees], device), dtype),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Computes grouped-query attention; see `Attention.attend`."""
        output = F.scaled_dot_product_attention(
            self.queries.to_grid(query),
            self.keys.to_grid(key),
            self.keys.to_grid(value),
            attn_mask=self.mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.queries.from_grid(output)


@dataclass(frozen=True, slots=True)
class _GridLayout:
    """Lays a stream out on a grid with one line for each tree, as wide as the largest tree.

    ``position`` int64 ``[rows]`` is the flat position of each row. ``ends`` int64 ``[trees, width]`` is the column
    after each row's subtree. The end of a pad is the end of its line, so the pad sees itself and its softmax is finite.
    No row sees a pad.
    """

    position: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(end: np.ndarray) -> _GridLayout:
        starts = tree_starts(end)
        sizes = np.diff(starts, append=len(end))
        width = int(sizes.max())
        line = np.repeat(np.arange(len(starts)), sizes)
        position = np.arange(len(end)) - starts[line] + line * width
        ends = np.full((len(starts), width), width, dtype=np.int64)
        ends.reshape(-1)[position] = end - starts[line]
        return _GridLayout(position, ends)


def _mask(query_columns: Tensor, key_ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask of 0 and -inf ``[lines, 1, query width, key width]``.

    ``query_columns`` is ``[lines, query width]`` and ``key_ends`` is ``[lines, key width]``.
    """
    columns = query_columns[:, :, None]
    sees = columns < key_ends[:, None, :]
    sees &= torch.arange(key_ends.shape[1], device=columns.device) <= columns
    mask = torch.full(sees.shape, float("-inf"), dtype=dtype, device=sees.device)
    return mask.masked_fill_(sees, 0.0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """Holds a micro-batch: ``groups``, their ``layout``, and this rank's rows as tensors with their attention.

    Rows are padded at the end (`RowSharding`). A pad is computed like any other row, but its result is never read.
    Without context parallelism the local tokens are all tokens. A batch without groups has one padding token with zero
    loss, because other ranks' collectives (experts, an interleaved pipeline, overlapped gradients) need this rank's
    part.
    """

    layout: TreeLayout
    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    predicting_rows: Tensor  # int64 [local tokens]
    targets: Tensor  # int64 [local tokens]
    max_position: int
    padded_rows: int  # rows of the whole stream
    attention: Attention  # the keys are the rows of all context-parallel ranks; a BranchPlan gathers them itself
    groups: Sequence[TokenTree] = ()
    sharding: RowSharding = WHOLE
    tokens: TokenSharding | None = None  # None without context parallelism
    routers: RouterRows = OWN_CHOICE  # for a mixture of experts
    rotary: Tensor | None = None  # float32 [3, rows]; None if all three rotary positions are `positions`
    media: MediaInputs | None = None  # on the first pipeline stage, if this rank has rows of an item
    levels: SegmentLevels | None = None  # for a model with a gated delta net
    # int64 [rows]; None without `levels`, or if this rank has exactly the stream's rows
    stream_places: Tensor | None = None
    gathered_rows: Tensor | None = None  # int64 [rows of the stream], with `levels` and context parallelism

    @staticmethod
    def of(
        layout: TreeLayout,
        groups: Sequence[TokenTree] = (),
        *,
        device: torch.device,
        dtype: torch.dtype,
        sharding: RowSharding = WHOLE,
        rows: int = 0,
    ) -> TreeBatch:
        """Moves this rank's part of the groups' layout to the device, and pads the stream to at least ``rows`` rows."""
        stream = len(layout.token_ids)
        padded = sharding.padded(max(rows, stream))
        mine, own_tokens, tokens = sharding.rows_of_rank(padded), slice(None), None
        predicting_rows = layout.predicting_rows
        if sharding.ranks > 1:
            owners = sharding.owners(layout.predicting_rows, padded)
            tokens = TokenSharding.of(owners, sharding, device)
            own_tokens = owners == sharding.rank
            predicting_rows = np.searchsorted(mine, layout.predicting_rows[own_tokens])
        return TreeBatch(
            layout=layout,
            groups=groups,
            token_ids=_put(_pad(layout.token_ids, padded - stream)[mine], device),
            positions=_put(_pad(layout.positions, padded - stream)[mine], device),
            predicting_rows=_put(predicting_rows, device),
            targets=_put(layout.targets[own_tokens], device),
            max_position=int(layout.positions.max()),
            padded_rows=padded,
            attention=attention_over(layout.end, sharding, padded=padded, device=device, dtype=attention_dtype(dtype)),
            sharding=sharding,
            tokens=tokens,
            rotary=None if layout.rotary is None else _rotary(layout.rotary, padded, mine, device),
        )

    def of_tokens(self, of_chosen: Tensor, *, otherwise: Tensor) -> Tensor:
        """Expands ``[chosen rows, …]`` to ``[tokens, …]``.

        A token that was not chosen gets its value in ``otherwise`` ``[tokens, …]`` and no gradient.
        """
        if self.layout.token_positions is None:
            return of_chosen
        indexes = torch.from_numpy(self.layout.token_positions).to(of_chosen.device)
        values = of_chosen[indexes.clamp(min=0)]
        present = (indexes >= 0).view(-1, *[1] * (values.ndim - 1))
        return torch.where(present, values, otherwise.to(values.dtype))

    def with_levels(self, net: DeltaNet | None) -> TreeBatch:
        """Returns the batch with inputs for gated delta nets: the layout's levels, and the indexes of this rank's rows.

        Returns the batch itself for a model without a gated delta net.
        """
        if net is None:
            return self
        stream, device = len(self.layout.end), self.token_ids.device
        levels = SegmentLevels.of(self.layout.end, kernel=net.kernel, device=device)
        if self.padded_rows == stream and self.sharding.ranks == 1:
            return replace(self, levels=levels)
        places = np.minimum(self.sharding.rows_of_rank(self.padded_rows), stream)
        gathered = None
        if self.sharding.ranks > 1:
            gathered = _put(self.sharding.gathered_order(self.padded_rows)[:stream], device)
        return replace(self, levels=levels, stream_places=_put(places, device), gathered_rows=gathered)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Computes grouped-query attention of this rank's rows and returns ``[rows, heads * dim]``.

        ``query`` is ``[rows, heads, dim]``; ``key`` and ``value`` are ``[rows, groups, dim]``. If ``scale`` is None it
        is 1 / sqrt(dim).
        """
        if self.sharding.group is not None and not isinstance(self.attention, BranchPlan):
            both = torch.cat([key, value], dim=-1)
            # The backward pass of the gather sums the ranks' gradients and returns to each rank the sums for its own
            # rows.
            gathered = gather_from_sequence_parallel_region(both, group=self.sharding.group)
            key, value = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        of_products = (tensor.to(attention_dtype(tensor.dtype)) for tensor in (query, key, value))
        return self.attention.attend(*of_products, scale=scale).to(query.dtype)


def attention_over(
    end: np.ndarray, sharding: RowSharding, *, padded: int, device: torch.device, dtype: torch.dtype
) -> Attention:
    """Chooses the attention for a stream of ``padded`` rows; ``end`` int64 ``[rows]`` covers all rows but the pads."""
    if training_device().gpu:
        return FlexBlocks.of(end, sharding, padded=padded, device=device)
    plan = BranchPlan.of(end, dtype=dtype, sharding=sharding, padded=padded)
    if plan is not None:
        return plan
    if sharding.ranks > 1:
        return MaskedGrid.of_rank(end, sharding, padded=padded, device=device, dtype=dtype)
    return MaskedGrid.of(end, pads=padded - len(end), device=device, dtype=dtype)


def _rotary(positions: np.ndarray, padded: int, mine: np.ndarray, device: torch.device) -> Tensor:
    whole = np.pad(positions.astype(np.float32), ((0, 0), (0, padded - positions.shape[1])))
    return _put(whole[:, mine], device)


def _put(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _pad(array: np.ndarray, pads: int) -> np.ndarray:
    return np.pad(array, (0, pads)) if pads else array

"""Attention over a tree-packed stream on a GPU: FlexAttention, with a plan of blocks made from ``end`` and no mask.

A row q sees a row k iff k <= q < end[k]. FlexAttention skips every block of 128 queries and 128 keys in which no query
sees a key, computes a block in which each sees each without looking at the rule, and asks the rule for every pair of
the others. The plan is made from the least and greatest row and end of each block, so it takes a few bytes a pair of
blocks, where torch's own `create_block_mask` first asks the rule for every pair of rows.

No GPU has run this. On a CPU the rule and the blocks are tested against torch's own, and the graphs that torch captures
against a dense mask, forward and backward; the kernels that it makes of them for a GPU are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_core.train.parallel.context_parallel import RowCut

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # rows, of queries and of keys


@dataclass(frozen=True, slots=True)
class FlexBlocks:
    """``mask``: which blocks are computed, and the rule for pairs of rows."""

    mask: BlockMask

    @staticmethod
    def of(end: np.ndarray, cut: RowCut, *, padded: int, device: torch.device) -> FlexBlocks:
        """This rank's rows of a stream of ``padded`` rows against all ranks' rows, which come rank after rank; ``end``
        int64 ``[rows]``. A pad is a tree of its own."""
        ends = np.append(end, np.arange(len(end), padded) + 1)
        key_rows = np.argsort(cut.gathered_order(padded))
        return FlexBlocks(_block_mask(cut.rows_of_rank(padded), key_rows, ends[key_rows], device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention; ``query`` ``[query rows, heads, dim]``, ``key`` and ``value`` ``[key rows, groups,
        dim]``. Returns ``[query rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim)."""
        by_heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = _kernel()(*by_heads, block_mask=self.mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        assert isinstance(output, Tensor)
        return output[0].transpose(0, 1).flatten(1)


@functools.cache
def _kernel() -> Callable[..., Any]:
    """FlexAttention as one kernel. The uncompiled one would hold all scores in memory; `fullgraph` makes torch raise
    where it would fall back to that."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(query_rows: np.ndarray, key_rows: np.ndarray, key_ends: np.ndarray, device: torch.device) -> BlockMask:
    """``query_rows`` int64 ``[query rows]`` and ``key_rows`` int64 ``[key rows]``: their numbers in the stream;
    ``key_ends`` int64 ``[key rows]``: the row behind each key's subtree."""
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
    """Blocks in which some query may see some key, and whole blocks in which each query sees each key, bool ``[query
    blocks, key blocks]``. The first is exact where a block's rows are neighbours in the stream."""
    first_query, last_query = _least(query_rows)[:, None], _greatest(query_rows)[:, None]
    some = (_least(key_rows) <= last_query) & (first_query < _greatest(key_ends))
    every = (_greatest(key_rows) <= first_query) & (last_query < _least(key_ends))
    every[len(query_rows) // BLOCK :] = every[:, len(key_rows) // BLOCK :] = False
    return some, every


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, int32 ``[1, 1, query blocks]``, and which, first in their order, int32
    ``[1, 1, query blocks, key blocks]``."""
    counts = blocks.sum(axis=1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


def _least(rows: np.ndarray) -> np.ndarray:
    return np.minimum.reduceat(rows, np.arange(0, len(rows), BLOCK))


def _greatest(rows: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(rows, np.arange(0, len(rows), BLOCK))

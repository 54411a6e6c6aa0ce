"""Computes attention over a tree-packed stream on a GPU with FlexAttention, planned in blocks without a mask.

A row q sees a row k if and only if k <= q < end[k]. FlexAttention skips every block of 128 queries and 128 keys in
which no query sees a key. It computes a block without the rule if every query sees every key, and applies the rule to
every pair of the other blocks. The plan is made from the least and the greatest row and end of each block, so it takes
a few bytes for each pair of blocks, while torch's own `create_block_mask` first applies the rule to every pair of rows.

No GPU has run this code. On a CPU the rule and the blocks are tested against torch's own, and the graphs that torch
captures are tested against a dense mask, forward and backward. The GPU kernels that torch compiles are not tested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from relax_core.train.parallel.context_parallel import RowSharding

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # The number of query rows and of key rows of a block.


@dataclass(frozen=True, slots=True)
class FlexBlocks:
    """Holds the blocks that are computed and the rule for pairs of rows."""

    mask: BlockMask

    @staticmethod
    def of(end: np.ndarray, sharding: RowSharding, *, padded: int, device: torch.device) -> FlexBlocks:
        """Plans this rank's rows of a stream of ``padded`` rows against all ranks' rows, which follow rank by rank.

        ``end`` is int64 ``[rows]``. A pad is a tree of its own.
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
    """Returns FlexAttention compiled to one kernel, because the uncompiled one holds all scores in memory.

    With `fullgraph` torch raises an error instead of falling back to the uncompiled one.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


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
    """Returns blocks in which some query may see some key, and whole blocks in which every query sees every key.

    Both are bool ``[query blocks, key blocks]``. The first is exact if the rows of each block are adjacent.
    """
    first_query, last_query = _least(query_rows)[:, None], _greatest(query_rows)[:, None]
    some = (_least(key_rows) <= last_query) & (first_query < _greatest(key_ends))
    every = (_greatest(key_rows) <= first_query) & (last_query < _least(key_ends))
    every[len(query_rows) // BLOCK :] = every[:, len(key_rows) // BLOCK :] = False
    return some, every


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks of each query block and the key blocks themselves, those that count first.

    They are int32 ``[1, 1, query blocks]`` and int32 ``[1, 1, query blocks, key blocks]``.
    """
    counts = blocks.sum(axis=1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


def _least(rows: np.ndarray) -> np.ndarray:
    return np.minimum.reduceat(rows, np.arange(0, len(rows), BLOCK))


def _greatest(rows: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(rows, np.arange(0, len(rows), BLOCK))

"""Shards the rows of a packed stream over context-parallel ranks and gathers their results.

Context parallelism splits the stream into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r (zig-zag).
Early rows attend to few rows and late rows attend to many, so the zig-zag balances the work. The stream is padded until
all chunks are equal and sequence parallelism can split each rank's rows again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowSharding:
    """Describes how a stream is sharded over the context-parallel ``group``; this process is ``rank`` of ``ranks``.

    The stream's number of rows is a multiple of ``multiple``. Inside the layers, sequence parallelism assigns this rank
    the ``part`` of ``parts`` of these rows.
    """

    multiple: int = 1
    ranks: int = 1
    rank: int = 0
    parts: int = 1
    part: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of_this_rank(*, sequence_parallel: bool) -> RowSharding:
        """Builds the sharding of this rank from Megatron's groups."""
        ranks = parallel_state.get_context_parallel_world_size()
        parts = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
        return RowSharding(
            multiple=parts * (2 * ranks if ranks > 1 else 1),
            ranks=ranks,
            rank=parallel_state.get_context_parallel_rank(),
            parts=parts,
            part=parallel_state.get_tensor_model_parallel_rank() if sequence_parallel else 0,
            group=parallel_state.get_context_parallel_group() if ranks > 1 else None,
        )

    def padded(self, rows: int) -> int:
        """Rounds ``rows`` up to a multiple of ``multiple``."""
        return -(-rows // self.multiple) * self.multiple

    def rows_of_rank(self, padded: int) -> np.ndarray:
        """Returns this rank's row numbers in a stream of ``padded`` rows, ascending, int64 ``[padded / ranks]``."""
        return self._rows_of(self.rank, padded)

    def rows_inside_layers(self, padded: int) -> np.ndarray:
        """Returns the numbers of this rank's rows inside the layers, int64 ``[padded / ranks / parts]``."""
        return self.rows_of_rank(padded).reshape(self.parts, -1)[self.part]

    def gathered_order(self, padded: int) -> np.ndarray:
        """Returns the index of each stream row in the concatenation of the ranks' rows, int64 ``[padded]``."""
        return np.argsort(np.concatenate([self._rows_of(rank, padded) for rank in range(self.ranks)]))

    def owners(self, rows: np.ndarray, padded: int) -> np.ndarray:
        """Returns the context-parallel rank of each row of ``rows``."""
        chunk = rows // (padded // (2 * self.ranks))
        return np.minimum(chunk, 2 * self.ranks - 1 - chunk)

    def _rows_of(self, rank: int, padded: int) -> np.ndarray:
        if self.ranks == 1:
            return np.arange(padded)
        chunk = padded // (2 * self.ranks)
        late = (2 * self.ranks - 1 - rank) * chunk
        return np.concatenate([np.arange(rank * chunk, (rank + 1) * chunk), np.arange(late, late + chunk)])


WHOLE = RowSharding()


def gathered_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns ``[rows, …]`` of all ranks of ``group`` concatenated in rank order, without gradient."""
    whole = rows.new_empty(len(rows) * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
    return whole


def summed_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums ``rows`` over the ranks and returns this rank's part of the sum, without gradient."""
    mine = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    dist.reduce_scatter_tensor(mine, rows, group=group)
    return mine


@dataclass(frozen=True, kw_only=True)
class TokenSharding:
    """Describes the response tokens that rows of this context-parallel rank predict.

    ``mine`` int64 ``[local tokens]`` are their indexes among all tokens. ``gathered`` int64 ``[tokens]`` has the index
    of each token in the concatenation of all ranks' tokens, where each rank's tokens are padded to ``longest``.
    """

    mine: Tensor
    gathered: Tensor
    longest: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(owners: np.ndarray, sharding: RowSharding, device: torch.device) -> TokenSharding:
        """Builds the description from ``owners``, the rank of each token."""
        counts = np.bincount(owners, minlength=sharding.ranks)
        longest = int(counts.max())
        by_rank = np.argsort(owners, kind="stable")
        gathered = np.empty(len(owners), dtype=np.int64)
        ordinal = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        gathered[by_rank] = owners[by_rank] * longest + ordinal
        return TokenSharding(
            mine=torch.from_numpy(np.flatnonzero(owners == sharding.rank)).to(device),
            gathered=torch.from_numpy(gathered).to(device),
            longest=longest,
            group=sharding.group,
        )

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """Gathers ``[local tokens, …]`` of all ranks into ``[tokens, …]`` in the tokens' order.

        All ranks must compute the same values from the result. The result's gradient is then equal on all ranks, so
        each rank keeps the part of the gradient for its own tokens and the ranks sum nothing.
        """
        assert self.group is not None
        gathered = _GatherTokens.apply(values, self)
        assert isinstance(gathered, Tensor)
        return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sharding: TokenSharding) -> Tensor:
        ctx.mine = sharding.mine
        padded = values.new_zeros(sharding.longest, *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(sharding.group))]
        dist.all_gather(parts, padded, group=sharding.group)
        return torch.cat(parts)[sharding.gathered]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.mine], None

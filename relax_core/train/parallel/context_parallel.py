"""Which rows of a packed stream this rank works on, and how ranks put their parts together again.

Context parallelism cuts the stream into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r (zig-zag), so
that early rows, which see little, and late rows, which see much, are shared evenly. The stream is padded so that the
chunks are equal, and so that sequence parallelism can cut each rank's rows once more.
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
class RowCut:
    """``multiple``: of what the stream's rows must be; ``ranks`` and ``rank``: of the context-parallel ``group``."""

    multiple: int = 1
    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of_this_rank(*, sequence_parallel: bool) -> RowCut:
        """As Megatron's groups say."""
        ranks = parallel_state.get_context_parallel_world_size()
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
        return RowCut(
            multiple=tensor_parallel * (2 * ranks if ranks > 1 else 1),
            ranks=ranks,
            rank=parallel_state.get_context_parallel_rank(),
            group=parallel_state.get_context_parallel_group() if ranks > 1 else None,
        )

    def padded(self, rows: int) -> int:
        """``rows`` rounded up."""
        return -(-rows // self.multiple) * self.multiple

    def rows_of_rank(self, padded: int) -> np.ndarray:
        """Numbers of this rank's rows in a stream of ``padded`` rows, ascending, int64 ``[padded / ranks]``."""
        return self._rows_of(self.rank, padded)

    def gathered_order(self, padded: int) -> np.ndarray:
        """Where each row of the stream lies once the ranks' rows stand one after the other, int64 ``[padded]``."""
        return np.argsort(np.concatenate([self._rows_of(rank, padded) for rank in range(self.ranks)]))

    def owners(self, rows: np.ndarray, padded: int) -> np.ndarray:
        """The context-parallel rank that has each of the ``rows``."""
        chunk = rows // (padded // (2 * self.ranks))
        return np.minimum(chunk, 2 * self.ranks - 1 - chunk)

    def _rows_of(self, rank: int, padded: int) -> np.ndarray:
        if self.ranks == 1:
            return np.arange(padded)
        chunk = padded // (2 * self.ranks)
        late = (2 * self.ranks - 1 - rank) * chunk
        return np.concatenate([np.arange(rank * chunk, (rank + 1) * chunk), np.arange(late, late + chunk)])


WHOLE = RowCut()


@dataclass(frozen=True, kw_only=True)
class TokenCut:
    """The response tokens whose predicting rows lie on this context-parallel rank.

    ``mine``: int64 ``[local tokens]``, their places among all tokens. ``gathered``: int64 ``[tokens]``, where each
    token lies once every rank's tokens, padded to ``longest``, stand one after the other.
    """

    mine: Tensor
    gathered: Tensor
    longest: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(owners: np.ndarray, cut: RowCut, device: torch.device) -> TokenCut:
        """``owners``: the rank of each token."""
        counts = np.bincount(owners, minlength=cut.ranks)
        longest = int(counts.max())
        by_rank = np.argsort(owners, kind="stable")
        gathered = np.empty(len(owners), dtype=np.int64)
        ordinal = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        gathered[by_rank] = owners[by_rank] * longest + ordinal
        return TokenCut(
            mine=torch.from_numpy(np.flatnonzero(owners == cut.rank)).to(device),
            gathered=torch.from_numpy(gathered).to(device),
            longest=longest,
            group=cut.group,
        )

    def of_all_ranks(self, values: Tensor) -> Tensor:
        """``[local tokens, …]`` of this rank → ``[tokens, …]``, in the tokens' order.

        All ranks must compute the same from the result: its gradient is taken to be the same on each, so that every
        rank keeps its own part of it and nothing is summed.
        """
        assert self.group is not None
        gathered = _GatherTokens.apply(values, self)
        assert isinstance(gathered, Tensor)
        return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cut: TokenCut) -> Tensor:
        ctx.mine = cut.mine
        padded = values.new_zeros(cut.longest, *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(cut.group))]
        dist.all_gather(parts, padded, group=cut.group)
        return torch.cat(parts)[cut.gathered]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.mine], None

"""Computes attention over a tree-packed stream on a CPU without a mask, run by run.

A run is a chain of adjacent rows with the same ``end``: each row is the only child of the row before it. A row attends
causally to its own run and fully to every run above it. The stream is depth-first, so the rows below a run are adjacent
and follow the run. One full call computes the attention of all these rows to the run. A run with children thus needs
one causal call and one full call. Only pairs of rows that see each other are computed; a masked grid would compute the
square of a whole tree. No mask takes memory. A chain without branches is one causal run.

The log-sum-exps join the partial softmaxes of a row. The backward pass of each call computes its share of the gradient
from the joined output and log-sum-exp, so only these two are saved. Ring attention does the same (Liu, Zaharia and
Abbeel 2023, arXiv 2310.01889). torch has no public call that returns the log-sum-exp. This module uses the two internal
operators that scaled_dot_product_attention runs on a CPU.

A context-parallel rank has the queries of two stretches of the stream and the keys of the whole stream. A run is cut
where a stretch begins or ends; each piece is then the only child of the piece before it. The same calls compute the
attention, with only the rank's own rows as queries. The mask that is not needed would grow with the square of a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_core.train.context_parallel import WHOLE, RowSharding, gathered_rows, summed_rows
from relax_core.train.micro_batches import MASKLESS_SAVES_PAIRS, tree_starts

# A run, or a run with its subtree, that has at least this many pairs gets a separate call without pads.
_LONE_PAIRS = 2**17
_JOINED_ROWS = 2**11  # Partial softmaxes are joined for this many rows at a time to bound memory.
_CALL_BYTES = 2**23  # The keys of the heads in one call fit into this number of bytes, to bound memory.
_CALL_PAIRS = 2**13  # The overhead of one call, in pairs of rows.


@dataclass(frozen=True, slots=True)
class _Lines:
    """Holds row ranges of the stream as lines of equal width; shorter ranges are padded at the end.

    A pad copies the last row of its range. Results of pads are never read.
    """

    count: int
    width: int
    rows: Tensor | slice  # rows of the stream, range by range
    sources: Tensor | None  # int64 [count * width], the row at each position of the lines; None if `rows` is a slice
    indexes: Tensor | None  # int64, flat index of each row in the lines; None without pads
    pads: Tensor | None  # int64, flat index of each pad; None without pads

    @staticmethod
    def of(starts: np.ndarray, lengths: np.ndarray) -> _Lines:
        """Builds the lines of one or more ranges; ``starts`` (ascending) and ``lengths`` are int64 ``[ranges]``."""
        count, width = len(starts), int(lengths.max())
        first, end = int(starts[0]), int(starts[-1] + lengths[-1])
        line = np.repeat(np.arange(count), lengths)
        column = np.arange(len(line)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tile = end - first == len(line)  # True if the ranges are adjacent
        listed = None if tile else torch.from_numpy(starts[line] + column)
        rows = slice(first, end) if listed is None else listed
        if len(line) == count * width:
            return _Lines(count, width, rows, listed, None, None)
        places = np.arange(width)
        sources = starts[:, None] + np.minimum(places, lengths[:, None] - 1)
        pads = np.flatnonzero(places >= lengths[:, None])
        of_rows = line * width + column
        return _Lines(count, width, rows, *map(torch.from_numpy, (sources.reshape(-1), of_rows, pads)))

    def to_lines(self, stream: Tensor, *, pad: float | None = None) -> Tensor:
        """Copies ``[rows, heads, ...]`` to lines ``[count, heads, width, ...]``; pads get the value ``pad``."""
        own = stream[self.rows] if self.sources is None else stream.index_select(0, self.sources)
        if pad is not None and self.pads is not None:
            own.index_fill_(0, self.pads, pad)
        return own.view(self.count, self.width, *own.shape[1:]).transpose(1, 2)

    def from_lines(self, lines: Tensor) -> Tensor:
        """Copies ``[count, heads, width, ...]`` back to ``[rows of the ranges, heads, ...]``."""
        flat = lines.transpose(1, 2).flatten(0, 1)
        return flat if self.indexes is None else flat.index_select(0, self.indexes)

    def add_to(self, stream: Tensor, lines: Tensor) -> None:
        """Adds ``[count, heads, width, ...]`` to the rows of ``stream``, ``[rows, heads, ...]``."""
        own = self.from_lines(lines)
        if isinstance(self.rows, slice):
            stream[self.rows] += own
        else:
            stream.index_add_(0, self.rows, own)

    def pad_mask(self, lengths: np.ndarray, dtype: torch.dtype) -> Tensor | None:
        """Returns ``[count, 1, 1, width]`` with 0 at rows and -inf at pads, or None without pads."""
        if self.indexes is None:
            return None
        pads = torch.arange(self.width) >= torch.from_numpy(lengths)[:, None]
        return torch.zeros(pads.shape, dtype=dtype).masked_fill_(pads, float("-inf"))[:, None, None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds one attention call: causal if a line's queries and keys are the same rows, otherwise full, pads masked."""

    queries: _Lines
    keys: _Lines
    causal: bool
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Returns outputs and log-sum-exps on the lines of the queries."""
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.queries.to_lines(query),
            self.keys.to_lines(key),
            self.keys.to_lines(value),
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=scale,
        )
        return output, log_sum

    def backward(self, grad: Tensor, saved: Sequence[Tensor], scale: float | None, *, grads: Sequence[Tensor]) -> None:
        """Adds this call's share to the gradients of query, key and value.

        ``saved`` holds query, key, value, output and log-sum-exp of all rows.
        """
        query, key, value, output, log_sum = saved
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.queries.to_lines(grad),
            self.queries.to_lines(query),
            self.keys.to_lines(key),
            self.keys.to_lines(value),
            self.queries.to_lines(output),
            self.queries.to_lines(log_sum, pad=float("inf")),  # The probabilities of a pad become 0 instead of 0 / 0.
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=scale,
        )
        for whole, part, lines in zip(grads, found, (self.queries, self.keys, self.keys), strict=True):
            lines.add_to(whole, part)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """Holds the calls that compute attention over one stream.

    Every row is in one call of ``causal``, and in one call of ``above`` for each run above the row's run. ``key_order``
    int64 ``[rows]`` has the index of each stream row among the keys of all ranks. It is None if the keys are in the
    order of the stream. ``group`` has the context-parallel ranks that exchange keys. It is None if the caller has all
    keys.
    """

    causal: Sequence[_Part]
    above: Sequence[_Part]
    key_order: Tensor | None = None
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(end: np.ndarray, *, dtype: torch.dtype, sharding: RowSharding = WHOLE, padded: int = 0) -> BranchPlan | None:
        """Plans this rank's rows of a stream, or returns None if one masked call is cheaper.

        ``end`` is int64 ``[rows]``, the row after each row's subtree. ``padded`` is the number of rows with pads. All
        ranks choose the same kind of attention, because the two kinds gather keys differently.
        """
        starts = tree_starts(end)
        widest = int(np.diff(starts, append=len(end)).max())
        masked = len(starts) * widest**2 if sharding.ranks == 1 else len(end) * widest
        if masked < MASKLESS_SAVES_PAIRS * sharding.ranks:
            return None
        whole = BranchPlan(*_parts(end, np.arange(len(end)), dtype))
        if masked - whole.pairs <= MASKLESS_SAVES_PAIRS * sharding.ranks:
            return None
        if sharding.ranks == 1:
            return whole
        mine = sharding.rows_of_rank(padded)
        order = torch.from_numpy(sharding.gathered_order(padded)[: len(end)])
        return BranchPlan(*_parts(end, mine[mine < len(end)], dtype), order, sharding.group)

    @property
    def pairs(self) -> float:
        """Returns the cost in pairs of rows: computed pairs, pads included, plus the overhead of the calls."""
        parts = [*self.causal, *self.above]
        computed = sum(p.queries.count * p.queries.width * p.keys.width * (0.5 if p.causal else 1.0) for p in parts)
        return computed + _CALL_PAIRS * len(parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Computes grouped-query attention and returns ``[rows, heads * dim]``. It is differentiable once.

        ``query`` is ``[query rows, heads, dim]``. ``key`` and ``value`` are ``[rows, groups, dim]``: this rank's rows
        if the plan has a group, otherwise the rows of all ranks. Rows after the end of the stream are ignored. If
        ``scale`` is None it is 1 / sqrt(dim).
        """
        output: Tensor = _BranchAttention.apply(query, key, value, self, scale)
        return output.flatten(1)

    def stream_rows(self, rows: Tensor) -> Tensor:
        """Returns the whole stream's keys or values ``[rows, heads, dim]`` from the arguments of `attend`."""
        if self.group is not None:
            rows = gathered_rows(rows, self.group)
        return rows if self.key_order is None else rows[self.key_order]

    def rank_rows(self, grads: Tensor, rows: int) -> Tensor:
        """Returns the gradients of `attend`'s ``rows`` input rows from ``grads``, the gradients of the whole stream."""
        if self.key_order is None:
            return grads
        by_rank = grads.new_zeros(rows * (1 if self.group is None else self.group.size()), *grads.shape[1:])
        by_rank[self.key_order] = grads
        return by_rank if self.group is None else summed_rows(by_rank, self.group)

    def head_ranges(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, list[slice]]]:
        """Yields the key heads of one call and the query heads that belong to them.

        The keys of a call's heads fit into `_CALL_BYTES`, but a call has at least one head for each thread of torch.
        """
        rows = len(key) if self.key_order is None else len(self.key_order)
        most = max(_CALL_BYTES // (rows * key[0, 0].nbytes), torch.get_num_threads())
        heads, key_heads = query.shape[1], key.shape[1]
        group_size = heads // key_heads
        together = min(max(most // group_size, 1), key_heads)
        step = min(most, group_size) if together == 1 else together * group_size
        for first in range(0, key_heads, together):
            stop = min(first + together, key_heads)
            starts = range(first * group_size, stop * group_size, step)
            yield slice(first, stop), [slice(start, min(start + step, stop * group_size)) for start in starts]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, output: Tensor, log_sum: Tensor
    ) -> None:
        """Computes some heads and fills ``output`` (shaped like ``query``) and ``log_sum`` ``[rows, heads]``.

        Both tensors contain zeros before the call.
        """
        for part in self.causal:
            for whole, found in zip((output, log_sum), part.forward(query, key, value, scale), strict=True):
                part.queries.add_to(whole, found)  # Each row is in one causal call, so its output is still 0.
        for part in self.above:
            of_above, its_log_sum = map(part.queries.from_lines, part.forward(query, key, value, scale))
            for start in range(0, len(of_above), _JOINED_ROWS):
                some = slice(start, start + _JOINED_ROWS)
                rows = _part_of(part.queries.rows, some)
                joined = torch.logaddexp(log_sum[rows], its_log_sum[some])
                own = output[rows] * (log_sum[rows] - joined).exp()[..., None]
                output[rows] = (own + of_above[some] * (its_log_sum[some] - joined).exp()[..., None]).to(output.dtype)
                log_sum[rows] = joined


class _BranchAttention(torch.autograd.Function):
    """Computes a few heads at a time. This bounds the memory that calls need in addition to inputs and outputs.

    With context parallelism, the forward pass and the backward pass each gather the keys and values of these heads.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: BranchPlan, scale: float | None) -> Tensor:
        output = torch.zeros_like(query)
        log_sum = query.new_zeros(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for key_heads, query_heads in plan.head_ranges(query, key):
            keys, values = plan.stream_rows(key[:, key_heads]), plan.stream_rows(value[:, key_heads])
            for heads in query_heads:
                found = {"output": output[:, heads], "log_sum": log_sum[:, heads]}
                plan.forward(query[:, heads], keys, values, scale, **found)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, log_sum = ctx.saved_tensors
        plan: BranchPlan = ctx.plan
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        in_place = plan.key_order is None
        for key_heads, query_heads in plan.head_ranges(query, key):
            keys, values = plan.stream_rows(key[:, key_heads]), plan.stream_rows(value[:, key_heads])
            of_keys, of_values = (
                whole[:, key_heads] if in_place else torch.zeros_like(keys) for whole in (of_key, of_value)
            )
            for heads in query_heads:
                saved = query[:, heads], keys, values, output[:, heads], log_sum[:, heads]
                grads = of_query[:, heads], of_keys, of_values
                for part in (*plan.causal, *plan.above):
                    part.backward(grad[:, heads], saved, ctx.scale, grads=grads)
            if not in_place:
                del keys, values, saved  # This frees the gathered keys and values before the gradients are exchanged.
                of_key[:, key_heads] = plan.rank_rows(of_keys, len(key))
                of_value[:, key_heads] = plan.rank_rows(of_values, len(value))
        return of_query, of_key, of_value, None, None


def _part_of(rows: Tensor | slice, some: slice) -> Tensor | slice:
    """Returns the entries ``some`` of ``rows``; ``rows`` is a range or a list of indexes."""
    if isinstance(rows, slice):
        return slice(rows.start + some.start, min(rows.start + some.stop, rows.stop))
    return rows[some]


# -- Planning -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Runs:
    """Holds the runs of a stream in order, as int64 ``[runs]``.

    ``own`` (bool) marks the runs whose rows are queries of this rank. ``first_query`` counts this rank's queries before
    a run. ``below`` counts this rank's queries before the run's end, and ``behind`` this rank's queries in the subtree
    below the run. ``levels`` counts the runs above a run.
    """

    starts: np.ndarray
    lengths: np.ndarray
    own: np.ndarray
    first_query: np.ndarray
    below: np.ndarray
    behind: np.ndarray
    levels: np.ndarray

    @staticmethod
    def of(end: np.ndarray, mine: np.ndarray) -> _Runs:
        """Finds the runs; ``mine`` are the rows of the queries, ascending.

        A run is cut where a stretch of queries begins or ends. Queries of adjacent rows are adjacent, because rows and
        queries are in the order of the stream.
        """
        # `end` stays the same only from a row to its only child, so a run begins wherever `end` changes.
        begins = np.diff(end, prepend=-1) != 0
        if len(mine) < len(end):
            is_query = np.zeros(len(end), dtype=bool)
            is_query[mine] = True
            begins |= np.diff(is_query, prepend=is_query[0])
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=len(end))
        ends = end[starts]
        closed = np.searchsorted(np.sort(ends), starts, side="right")  # number of subtrees that end before each run
        first, below, last = (np.searchsorted(mine, edges) for edges in (starts, starts + lengths, ends))
        return _Runs(starts, lengths, below > first, first, below, last - below, np.arange(len(starts)) - closed)

    def causal_part(self, some: np.ndarray) -> _Part:
        """Returns the causal call of the runs ``some``, which have queries of this rank."""
        keys = _Lines.of(self.starts[some], self.lengths[some])
        whole = len(self.starts) == self.own.sum()  # Queries and keys are then the same rows.
        return _Part(keys if whole else _Lines.of(self.first_query[some], self.lengths[some]), keys, True)

    def above_part(self, some: np.ndarray, dtype: torch.dtype) -> _Part:
        """Returns the call of the subtrees below the runs ``some`` against these runs.

        No run of ``some`` is above another.
        """
        keys = _Lines.of(self.starts[some], self.lengths[some])
        queries = _Lines.of(self.below[some], self.behind[some])
        return _Part(queries, keys, False, keys.pad_mask(self.lengths[some], dtype))

    def parents_together(self) -> list[np.ndarray]:
        """Returns runs with children, grouped into calls by level: a row has only one run above it on each level.

        Runs with many pairs get separate calls, and similar runs share a call.
        """
        together = []
        for level in range(int(self.levels.max()) + 1):
            parents = np.flatnonzero((self.levels == level) & (self.behind > 0))
            large = self.behind[parents] * self.lengths[parents] >= _LONE_PAIRS
            together += [parents[index : index + 1] for index in np.flatnonzero(large)]
            together += self._alike_parents(parents[~large])
        return together

    def _alike_parents(self, parents: np.ndarray) -> list[np.ndarray]:
        """Groups ``parents`` into calls, largest first.

        Each run joins the call that needs the fewest padded pairs for the run, or gets a separate call if this is
        cheaper.
        """
        behind, lengths = self.behind[parents], self.lengths[parents]
        # a call's largest number of rows, its largest number of keys, and its members
        calls: list[tuple[int, int, list[int]]] = []
        for index in np.argsort(-behind * lengths, kind="stable").tolist():
            rows, keys = int(behind[index]), int(lengths[index])
            best, fewest = -1, _CALL_PAIRS
            for number, (widest, longest, members) in enumerate(calls):
                padded = (len(members) + 1) * max(widest, rows) * max(longest, keys)
                pads = padded - len(members) * widest * longest - rows * keys
                if pads < fewest:
                    best, fewest = number, pads
            if best < 0:
                calls.append((rows, keys, [index]))
            else:
                widest, longest, members = calls[best]
                calls[best] = (max(widest, rows), max(longest, keys), [*members, index])
        return [parents[sorted(members)] for *_, members in calls]


def _parts(end: np.ndarray, mine: np.ndarray, dtype: torch.dtype) -> tuple[list[_Part], list[_Part]]:
    """Returns the causal calls, and the calls against runs above, for the queries at the stream's rows ``mine``."""
    if not len(mine):
        return [], []
    runs = _Runs.of(end, mine)
    own = np.flatnonzero(runs.own)
    causal = [runs.causal_part(own[alike]) for alike in _alike(runs.lengths[own])]
    return causal, [runs.above_part(some, dtype) for some in runs.parents_together()]


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups runs of similar length into calls. A long run has a separate call."""
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    cuts, begin = [0], 0
    for index in range(1, len(order)):
        longest, next_one = int(longest_first[begin]), int(longest_first[index])
        saved = (len(order) - index) * (longest**2 - next_one**2) // 2
        if longest**2 // 2 >= _LONE_PAIRS or (4 * next_one <= 3 * longest and saved > _CALL_PAIRS):
            cuts.append(index)
            begin = index
    return [np.sort(some) for some in np.split(order, cuts[1:])]

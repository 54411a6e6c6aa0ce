"""Attention over a tree-packed stream without a mask, for a CPU: causal runs, and what subtrees see of the run above.

A run is a chain of neighbouring rows that have the same ``end``: each row is the only child of the one before. A row
attends to its own run causally, and to every run above it in full. All rows behind a run inside its subtree are
neighbours, because the stream is depth-first, so one call serves them all: a run with children takes one causal call
and one full call, whatever hangs below it. Exactly the pairs of rows that see each other are computed, where one masked
grid computes the square of a whole tree; and no mask takes memory. A chain without branches is one causal run.

The parts of a row's softmax are joined by their log-sum-exps. The backward pass of each part gets the joined output
and log-sum-exp, from which it computes its share of the gradient, as ring attention does (Liu, Zaharia and Abbeel
2023, arXiv 2310.01889), so nothing is kept beside them. torch has no public call that gives the log-sum-exp; the two
operators used here are those that its scaled_dot_product_attention itself runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.train.packing.tree_packing import MASKLESS_SAVES_PAIRS, tree_starts

_LONE_PAIRS = 2**17  # a run, or a run with what hangs below it, of so many pairs gets a call of its own, without pads
_CALL_PAIRS = 2**13  # what one more call costs, as pairs of rows


@dataclass(frozen=True, slots=True)
class _Lines:
    """Row ranges of the stream as lines of one width, zeros behind the shorter ones."""

    count: int
    width: int
    rows: Tensor | slice  # of the stream, range by range
    places: Tensor | None  # int64, where they stand on the lines; None: there are no pads

    @staticmethod
    def of(starts: np.ndarray, lengths: np.ndarray) -> _Lines:
        """``starts``, ascending, and ``lengths`` int64 ``[ranges]``, one range or more."""
        count, width = len(starts), int(lengths.max())
        first, end = int(starts[0]), int(starts[-1] + lengths[-1])
        line = np.repeat(np.arange(count), lengths)
        place = np.arange(len(line)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tile = end - first == len(line)  # no other range lies between them
        rows = slice(first, end) if tile else torch.from_numpy(starts[line] + place)
        full = len(line) == count * width
        return _Lines(count, width, rows, None if full else torch.from_numpy(line * width + place))

    def place(self, stream: Tensor, *, pad: float = 0.0) -> Tensor:
        """``[rows, heads, ...]`` → ``[count, heads, width, ...]``."""
        own = stream[self.rows]
        if self.places is not None:
            padded = own.new_full((self.count * self.width, *own.shape[1:]), pad)
            padded[self.places] = own
            own = padded
        return own.view(self.count, self.width, *own.shape[1:]).transpose(1, 2)

    def take(self, placed: Tensor) -> Tensor:
        """``[count, heads, width, ...]`` → ``[rows of the ranges, heads, ...]``."""
        flat = placed.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def pad_mask(self, lengths: np.ndarray, dtype: torch.dtype) -> Tensor | None:
        """``[count, 1, 1, width]``: 0, and -inf at the pads; None without any."""
        if self.places is None:
            return None
        pads = torch.arange(self.width) >= torch.from_numpy(lengths)[:, None]
        return torch.zeros(pads.shape, dtype=dtype).masked_fill_(pads, float("-inf"))[:, None, None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One call: which rows attend to which. Causal where a line's queries are its keys; else to all but pads."""

    queries: _Lines
    keys: _Lines
    causal: bool
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps of the queries' rows."""
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.queries.place(query),
            self.keys.place(key),
            self.keys.place(value),
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=scale,
        )
        return self.queries.take(output), self.queries.take(log_sum)

    def backward(self, grad: Tensor, saved: Sequence[Tensor], scale: float | None, *, grads: Sequence[Tensor]) -> None:
        """Adds to the gradients of query, key and value what comes of this part.

        ``saved``: query, key, value, output and log-sum-exp of all rows.
        """
        query, key, value, output, log_sum = saved
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.queries.place(grad),
            self.queries.place(query),
            self.keys.place(key),
            self.keys.place(value),
            self.queries.place(output),
            self.queries.place(log_sum, pad=float("inf")),  # so that a pad's probabilities are 0, not 0 / 0
            0.0,
            self.causal,
            attn_mask=self.mask,
            scale=scale,
        )
        for whole, part, lines in zip(grads, found, (self.queries, self.keys, self.keys), strict=True):
            whole[lines.rows] += lines.take(part)


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """The calls that attention over one stream takes. Every row is in one part of ``causal``, and once in ``above`` for
    each run above its own."""

    causal: Sequence[_Part]
    above: Sequence[_Part]

    @staticmethod
    def of(end: np.ndarray, *, dtype: torch.dtype) -> BranchPlan | None:
        """``end``: int64 ``[rows]``, the row behind each row's subtree. None where one masked call is cheaper."""
        starts = tree_starts(end)
        masked = len(starts) * int(np.diff(starts, append=len(end)).max()) ** 2
        if masked < MASKLESS_SAVES_PAIRS:
            return None
        runs = _Runs.of(end)
        lines = [_Lines.of(runs.starts[some], runs.lengths[some]) for some in _alike(runs.lengths)]
        above = [runs.above_part(some, dtype) for some in runs.parents_together()]
        plan = BranchPlan([_Part(both, both, True) for both in lines], above)
        return plan if masked - plan.pairs > MASKLESS_SAVES_PAIRS else None

    @property
    def pairs(self) -> float:
        """Pairs of rows that are computed, pads included, and what the calls cost beside them."""
        parts = [*self.causal, *self.above]
        computed = sum(p.queries.count * p.queries.width * p.keys.width * (0.5 if p.causal else 1.0) for p in parts)
        return computed + _CALL_PAIRS * len(parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Grouped-query attention; ``query`` ``[rows, heads, dim]``, ``key`` and ``value`` ``[rows, groups, dim]``, the
        stream first and any rows behind it ignored. Returns ``[rows, heads * dim]``. ``scale`` None: 1 / sqrt(dim).
        Not differentiable twice."""
        output: Tensor = _BranchAttention.apply(query, key, value, self, scale)
        return output.flatten(1)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: BranchPlan, scale: float | None) -> Tensor:
        output = torch.zeros_like(query)
        log_sum = query.new_zeros(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in plan.causal:
            output[part.queries.rows], log_sum[part.queries.rows] = part.forward(query, key, value, scale)
        for part in plan.above:
            rows = part.queries.rows
            of_above, its_log_sum = part.forward(query, key, value, scale)
            joined = torch.logaddexp(log_sum[rows], its_log_sum)
            own = output[rows] * (log_sum[rows] - joined).exp()[..., None]
            output[rows] = (own + of_above * (its_log_sum - joined).exp()[..., None]).to(output.dtype)
            log_sum[rows] = joined
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        saved = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in saved[:3])
        for part in (*ctx.plan.causal, *ctx.plan.above):
            part.backward(grad, saved, ctx.scale, grads=(of_query, of_key, of_value))
        return of_query, of_key, of_value, None, None


# -- planning -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a stream in order: ``starts`` and ``lengths``; ``behind``, the rows of a run's subtree behind the
    run; ``levels``, how many runs lie above it. All int64 ``[runs]``."""

    starts: np.ndarray
    lengths: np.ndarray
    behind: np.ndarray
    levels: np.ndarray

    @staticmethod
    def of(end: np.ndarray) -> _Runs:
        # Only from a row to its only child does `end` stay the same, so a run begins wherever it changes.
        starts = np.flatnonzero(np.diff(end, prepend=-1))
        lengths = np.diff(starts, append=len(end))
        ends = end[starts]
        closed = np.searchsorted(np.sort(ends), starts, side="right")  # subtrees that are over before each run
        return _Runs(starts, lengths, ends - starts - lengths, np.arange(len(starts)) - closed)

    def above_part(self, some: np.ndarray, dtype: torch.dtype) -> _Part:
        """What hangs below the runs ``some``, of which none lies above another, against these runs."""
        keys = _Lines.of(self.starts[some], self.lengths[some])
        queries = _Lines.of(self.starts[some] + self.lengths[some], self.behind[some])
        return _Part(queries, keys, False, keys.pad_mask(self.lengths[some], dtype))

    def parents_together(self) -> list[np.ndarray]:
        """Runs with children, level by level, since a row has one run above it on each level: those of many pairs
        alone, and those that are alike together."""
        together = []
        for level in range(int(self.levels.max()) + 1):
            parents = np.flatnonzero((self.levels == level) & (self.behind > 0))
            large = self.behind[parents] * self.lengths[parents] >= _LONE_PAIRS
            together += [parents[place : place + 1] for place in np.flatnonzero(large)]
            together += self._alike_parents(parents[~large])
        return together

    def _alike_parents(self, parents: np.ndarray) -> list[np.ndarray]:
        """``parents`` in calls, largest first, each in the call where the fewest pairs are padded for it, or in a call
        of its own where that is cheaper."""
        behind, lengths = self.behind[parents], self.lengths[parents]
        calls: list[tuple[int, int, list[int]]] = []  # rows and keys of the widest, and who is in it
        for place in np.argsort(-behind * lengths, kind="stable").tolist():
            rows, keys = int(behind[place]), int(lengths[place])
            best, fewest = -1, _CALL_PAIRS
            for number, (widest, longest, members) in enumerate(calls):
                padded = (len(members) + 1) * max(widest, rows) * max(longest, keys)
                pads = padded - len(members) * widest * longest - rows * keys
                if pads < fewest:
                    best, fewest = number, pads
            if best < 0:
                calls.append((rows, keys, [place]))
            else:
                widest, longest, members = calls[best]
                calls[best] = (max(widest, rows), max(longest, keys), [*members, place])
        return [parents[sorted(members)] for *_, members in calls]


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Runs that go together: long ones alone, others with those that are no shorter than 3/4 of the longest."""
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    cuts, begin = [0], 0
    for place in range(1, len(order)):
        longest, next_one = int(longest_first[begin]), int(longest_first[place])
        saved = (len(order) - place) * (longest**2 - next_one**2) // 2
        if longest**2 // 2 >= _LONE_PAIRS or (4 * next_one <= 3 * longest and saved > _CALL_PAIRS):
            cuts.append(place)
            begin = place
    return [np.sort(some) for some in np.split(order, cuts[1:])]

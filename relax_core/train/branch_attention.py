"""Attention over a tree-packed stream without a mask, for a CPU: causal ranges, and what branches see of their prompt.

A row attends to its own range, causally, and a row of a branch to all of its prompt besides. So a group of prompt P and
branches b_i costs P²/2 + P Σ b_i + Σ b_i²/2 pairs of rows, where one masked grid costs (P + Σ b_i)²; and the mask's
memory goes. A group whose responses share nothing, of one sample, is one causal range: plain packing.

The two parts of a branch's softmax are joined by their log-sum-exps. The backward pass of each part gets the joined
output and log-sum-exp, from which it computes its share of the gradient, as ring attention does (Liu, Zaharia and
Abbeel 2023, arXiv 2310.01889): so nothing is kept beside them. torch has no public call that gives the log-sum-exp;
these are the two operators that its scaled_dot_product_attention itself runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.train.tree import MASKLESS_SAVES_PAIRS, TreeLayout

_LONE_PAIRS = 2**17  # a range, or a prompt with its branches, of so many pairs gets a call of its own, without pads
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
    """The calls that attention over one stream takes: every row in one of ``causal``, those of branches in one of
    ``prompts`` too."""

    causal: Sequence[_Part]
    prompts: Sequence[_Part]

    @staticmethod
    def of(layout: TreeLayout, *, dtype: torch.dtype) -> BranchPlan | None:
        """None where one masked call is the cheaper way."""
        masked = layout.branches.shape[0] * layout.branches.shape[1] ** 2
        if masked < MASKLESS_SAVES_PAIRS:
            return None
        ranges = _Ranges.of(layout)
        causal = [_Lines.of(ranges.starts[some], ranges.lengths[some]) for some in _alike(ranges.lengths)]
        prompts = [ranges.prompt_part(some, dtype) for some in ranges.groups_together()]
        plan = BranchPlan([_Part(lines, lines, True) for lines in causal], prompts)
        return plan if masked - plan.pairs > MASKLESS_SAVES_PAIRS else None

    @property
    def pairs(self) -> float:
        """Pairs of rows that are computed, pads included, and what the calls cost beside them."""
        parts = [*self.causal, *self.prompts]
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
        for part in plan.prompts:
            rows = part.queries.rows
            of_prompt, its_log_sum = part.forward(query, key, value, scale)
            joined = torch.logaddexp(log_sum[rows], its_log_sum)
            own = output[rows] * (log_sum[rows] - joined).exp()[..., None]
            output[rows] = (own + of_prompt * (its_log_sum - joined).exp()[..., None]).to(output.dtype)
            log_sum[rows] = joined
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        saved = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in saved[:3])
        for part in (*ctx.plan.causal, *ctx.plan.prompts):
            part.backward(grad, saved, ctx.scale, grads=(of_query, of_key, of_value))
        return of_query, of_key, of_value, None, None


# -- planning -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Ranges:
    """``starts``, ``lengths`` ``[ranges]``: prompts and branches that are in the stream, where a prompt with one branch
    alone is one range. Of the groups with more: their prompts' ranges, and their branches' rows as one range."""

    starts: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray  # int64 [groups with branches], places in `starts`
    branch_rows: np.ndarray  # int64 [groups with branches]

    @staticmethod
    def of(layout: TreeLayout) -> _Ranges:
        branch = layout.branches.reshape(-1)[layout.grid_places]
        begins = (np.diff(branch, prepend=-1) != 0) | (layout.positions == 0)
        starts = np.flatnonzero(begins)
        of_prompt = branch[starts] == 0
        group = np.cumsum(of_prompt) - 1
        alone = np.bincount(group)[group] == 2
        keep = of_prompt | ~alone
        starts, of_prompt, alone = starts[keep], of_prompt[keep], alone[keep]
        lengths = np.diff(starts, append=len(branch))
        first = np.flatnonzero(of_prompt)
        ends = np.append(starts[first[1:]], len(branch))
        rows = ends - starts[first] - lengths[first]
        return _Ranges(starts, lengths, first[rows > 0], rows[rows > 0])

    def prompt_part(self, some: np.ndarray, dtype: torch.dtype) -> _Part:
        """Branches of the groups ``some`` against their prompts."""
        prompts, rows = self.prompts[some], self.branch_rows[some]
        keys = _Lines.of(self.starts[prompts], self.lengths[prompts])
        queries = _Lines.of(self.starts[prompts] + self.lengths[prompts], rows)
        return _Part(queries, keys, False, keys.pad_mask(self.lengths[prompts], dtype))

    def groups_together(self) -> list[np.ndarray]:
        """Large groups alone, all others as one."""
        large = self.branch_rows * self.lengths[self.prompts] >= _LONE_PAIRS
        together = [np.array([place]) for place in np.flatnonzero(large)]
        return [*together, np.flatnonzero(~large)] if not large.all() else together


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Ranges that go together: long ones alone, others with those that are no shorter than 3/4 of the longest."""
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

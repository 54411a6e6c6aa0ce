"""Makes random forests of token rows. The parents define visibility and dense masked attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from relax_core.train.context_parallel import RowSharding

HEADS, KEY_HEADS, DIM = 4, 2, 8


@dataclass(frozen=True)
class Forest:
    """Holds the ``parents`` of rows in depth-first order. The parent of a root is -1."""

    parents: Sequence[int]

    @property
    def end(self) -> np.ndarray:
        """Returns for each row the first row after its subtree, int64 ``[rows]``."""
        end = np.arange(len(self.parents)) + 1
        for row in reversed(range(len(self.parents))):
            if self.parents[row] >= 0:
                end[self.parents[row]] = max(end[self.parents[row]], end[row])
        return end

    @property
    def sees(self) -> np.ndarray:
        """Returns bool ``[rows, rows]``: a row attends to itself and to the rows that its parent attends to."""
        sees = np.eye(len(self.parents), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                sees[row] |= sees[parent]
        return sees


@st.composite
def forests(draw: st.DrawFn, *, max_runs: int = 12, longest: int = 30) -> Forest:
    """Draws chains of rows. A chain begins a new tree, or attaches anywhere on the path of the previous row."""
    chains = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(0, 10**6)), min_size=1, max_size=max_runs))
    parents: list[int] = []
    for length, choice in chains:
        path = [-1]
        if parents:
            row = len(parents) - 1
            while row >= 0:
                path.append(row)
                row = parents[row]
        parent = path[choice % len(path)]
        for _ in range(length):
            parents.append(parent)
            parent = len(parents) - 1
    return Forest(parents)


def two_level(lengths: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Forest:
    """Makes prompts with responses of the given numbers of tokens. The last token of a response has no row."""
    parents: list[int] = []
    for prompt, responses in zip(prompt_lengths, lengths, strict=True):
        start = len(parents)
        parents += [-1, *range(start, start + prompt - 1)]
        for length in responses:
            first = len(parents)
            parents += [start + prompt - 1, *range(first, first + length - 2)][: length - 1]
    return Forest(parents)


def random_rows(rows: int, *, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Draws query, key, value and the output's gradient. The numbers are the same in every dtype."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    inputs = [normal(rows, heads, DIM).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [*inputs, normal(rows, HEADS * DIM)]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Forest, int, int, int]:
    """Draws a forest, a number of context-parallel ranks, rows of padding and a seed."""
    return draw(forests()), draw(st.integers(2, 4)), draw(st.integers(0, 9)), draw(st.integers(0, 1000))


def check_ranks(case: tuple[Forest, int, int, int], attention: Callable[[Forest, RowSharding, int], Any]) -> None:
    """Compares attention on context-parallel ranks with attention by its definition.

    Each rank computes its queries against the gathered keys of all ranks, and the gradients add up. ``attention`` takes
    a forest, a rank's sharding and the number of padded rows, and returns an object with ``attend``.
    """
    forest, ranks, more, seed = case
    rows = len(forest.parents)
    shardings = [RowSharding(multiple=2 * ranks, ranks=ranks, rank=rank) for rank in range(ranks)]
    padded = shardings[0].padded(rows + more)
    *inputs, incoming = random_rows(padded, dtype=torch.float64, seed=seed)
    incoming[rows:] = 0  # the result of a padding row is not used
    order = torch.from_numpy(shardings[0].gathered_order(padded)).argsort()
    total = [torch.zeros_like(tensor) for tensor in inputs]
    output = torch.zeros_like(incoming)
    for sharding in shardings:
        mine = torch.from_numpy(sharding.rows_of_rank(padded))
        query, key, value = inputs
        part = attention(forest, sharding, padded).attend(query[mine], key[order], value[order], scale=None)
        output[mine] = part.detach()
        for sum_of, grad in zip(total, torch.autograd.grad(part, inputs, incoming[mine]), strict=True):
            sum_of += grad
    assert output.isfinite().all()
    dense = dense_attention(*(tensor[:rows] for tensor in inputs), forest.sees, scale=None)
    torch.testing.assert_close(output[:rows], dense, rtol=1e-12, atol=1e-12)
    for mine, expected in zip(total, torch.autograd.grad(dense, inputs, incoming[:rows]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, sees: np.ndarray, *, scale: float | None) -> Tensor:
    """Computes attention by its definition. ``sees`` is bool ``[query rows, key rows]``."""
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (DIM**-0.5 if scale is None else scale)
    weights = scores.masked_fill(~torch.from_numpy(sees), -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

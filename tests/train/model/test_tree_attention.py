"""Compares one masked call over a forest with a dense mask: on one rank and on context-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from forests import Forest, check_ranks, dense_attention, forests, random_rows, sharded
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.train.context_parallel import RowSharding
from relax_core.train.model.tree_attention import MaskedGrid

torch.set_num_threads(1)
CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(forest=forests(), pads=st.integers(0, 5), seed=st.integers(0, 1000))
def test_a_grid_is_the_dense_attention(forest: Forest, pads: int, seed: int) -> None:
    rows = len(forest.parents)
    *inputs, incoming = random_rows(rows + pads, dtype=torch.float64, seed=seed)
    incoming[rows:] = 0  # the result of a padding row is not used
    grid = MaskedGrid.of(forest.end, pads=pads, device=CPU, dtype=torch.float64)
    assert grid.mask.isfinite().any(-1).all()  # the softmax of a padding row is finite
    output = grid.attend(*inputs, scale=None)
    grads = torch.autograd.grad(output, inputs, incoming)
    dense = dense_attention(*(tensor[:rows] for tensor in inputs), forest.sees, scale=None)
    torch.testing.assert_close(output[:rows], dense, rtol=1e-12, atol=1e-12)
    for mine, expected in zip(grads, torch.autograd.grad(dense, inputs, incoming[:rows]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(sharded())
def test_context_parallel_ranks_make_the_dense_attention(case: tuple[Forest, int, int, int]) -> None:
    def grid_of(forest: Forest, sharding: RowSharding, padded: int) -> MaskedGrid:
        grid = MaskedGrid.of_rank(forest.end, sharding, padded=padded, device=CPU, dtype=torch.float64)
        assert grid.mask.isfinite().any(-1).all()
        return grid

    check_ranks(case, grid_of)


@pytest.mark.parametrize("pads", [0, 3])
def test_float32(pads: int) -> None:
    forest = Forest([-1, 0, 1, 2, 3, 4, 4, 4, 2, 8, -1, 10])
    *inputs, incoming = random_rows(12 + pads, dtype=torch.float32, seed=1)
    incoming[12:] = 0
    output = MaskedGrid.of(forest.end, pads=pads, device=CPU, dtype=torch.float32).attend(*inputs, scale=None)
    exact = [tensor.detach()[:12].double().requires_grad_() for tensor in inputs]
    dense = dense_attention(*exact, forest.sees, scale=None)
    torch.testing.assert_close(output[:12].double(), dense, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(output, inputs, incoming)
    for mine, expected in zip(grads, torch.autograd.grad(dense, exact, incoming[:12].double()), strict=True):
        torch.testing.assert_close(mine[:12].double(), expected, rtol=0, atol=1e-5)

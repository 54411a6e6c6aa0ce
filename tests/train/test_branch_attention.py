"""Attention without a mask against the masked one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import make_groups
from torch import Tensor

from relax_core.train import branch_attention
from relax_core.train.branch_attention import BranchPlan
from relax_core.train.tree import TreeLayout, pack_tree
from relax_core.train.tree_attention import TreeBatch

torch.set_num_threads(1)
HEADS, KEY_HEADS, DIM = 4, 2, 8


def masked_and_planned(
    layout: TreeLayout, *, dtype: torch.dtype, pads: int = 0, scale: float | None = None, seed: int = 0
) -> list[list[Tensor]]:
    """Output and the three gradients, by the masked grid and by the plan; ``pads``: rows behind the stream."""
    rows = len(layout.token_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "MASKLESS_SAVES_PAIRS", 10**12)
        tree = TreeBatch.of(layout, device=torch.device("cpu"), dtype=dtype, rows=rows + pads)
        assert tree.plan is None
        patch.setattr(branch_attention, "MASKLESS_SAVES_PAIRS", -(10**12))
        plan = BranchPlan.of(layout, dtype=dtype)
        assert plan is not None
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    query, key, value = (normal(rows + pads, heads, DIM).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    incoming = normal(rows + pads, HEADS * DIM)
    incoming[rows:] = 0  # nothing reads what comes of a pad
    results = []
    for way in (tree, dataclasses.replace(tree, mask=None, plan=plan)):
        output = way.attend(query, key, value, scale=scale)
        grads = torch.autograd.grad(output, [query, key, value], incoming)
        results.append([output.detach()[:rows], *grads])
    return results


@st.composite
def layouts(draw: st.DrawFn) -> TreeLayout:
    """Groups of one sample and of several, some with responses of one token, which have no rows."""
    groups = draw(st.integers(1, 5))
    lengths = [draw(st.lists(st.integers(1, 30), min_size=1, max_size=5)) for _ in range(groups)]
    return pack_tree(make_groups(lengths, prompt_lengths=[draw(st.integers(1, 40)) for _ in range(groups)]))


@settings(max_examples=100, deadline=None)
@given(
    layout=layouts(),
    pads=st.integers(0, 3),
    scale=st.sampled_from([None, 0.1, 2.0]),
    lone_pairs=st.sampled_from([1, 50, 2**17]),
    call_pairs=st.sampled_from([0, 100, 2**13]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_masked_attention(
    layout: TreeLayout, pads: int, scale: float | None, lone_pairs: int, call_pairs: int, seed: int
) -> None:
    """However the ranges are put together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "_LONE_PAIRS", lone_pairs)
        patch.setattr(branch_attention, "_CALL_PAIRS", call_pairs)
        masked, planned = masked_and_planned(layout, dtype=torch.float64, pads=pads, scale=scale, seed=seed)
    for mine, expected in zip(planned, masked, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    layout = pack_tree(make_groups([[60, 7, 33], [50], [1, 20]], prompt_lengths=[200, 90, 15]))
    exact, _ = masked_and_planned(layout, dtype=torch.float64)
    _, planned = masked_and_planned(layout, dtype=dtype)
    masked, _ = masked_and_planned(layout, dtype=dtype)
    torch.testing.assert_close(planned[0].double(), exact[0], rtol=0, atol=4 * tolerance)
    for mine, expected in zip(planned, masked, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=4 * tolerance)


def test_every_row_is_once_in_a_causal_range_and_branches_see_their_prompts() -> None:
    """Pairs by hand: prompts 4 and 6, branches 2 and 5; 3 alone, so it goes on its prompt's range."""
    layout = pack_tree(make_groups([[3, 6], [4], [1, 1]], prompt_lengths=[4, 6, 2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "MASKLESS_SAVES_PAIRS", -(10**12))
        patch.setattr(branch_attention, "_LONE_PAIRS", 1)  # each range a call of its own
        plan = BranchPlan.of(layout, dtype=torch.float32)
    assert plan is not None
    ranges = [part.queries.rows for part in plan.causal]
    assert sorted((rows.start, rows.stop) for rows in ranges if isinstance(rows, slice)) == [
        *((0, 4), (4, 6), (6, 11), (11, 20), (20, 22))
    ]
    ((queries, keys),) = [(part.queries.rows, part.keys.rows) for part in plan.prompts]
    assert (queries, keys) == (slice(4, 11), slice(0, 4))


@pytest.mark.parametrize(
    ("lengths", "prompt", "planned"),
    [
        ([[8] * 16] * 8, 17, False),  # the demo: a few more calls would cost more than they save
        ([[100] * 8] * 2, 64, True),
        ([[50]] * 4, 30, False),
        ([[500]] * 4, 30, True),
        ([[30] * 4], 600, True),
    ],
)
def test_which_way_is_taken(lengths: list[list[int]], prompt: int, planned: bool) -> None:
    layout = pack_tree(make_groups(lengths, prompt_lengths=[prompt] * len(lengths)))
    tree = TreeBatch.of(layout, device=torch.device("cpu"), dtype=torch.float32)
    assert (tree.plan is not None) == planned == (tree.mask is None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_ranges_that_go_together(lengths: list[int]) -> None:
    """Each once; those of a call are so alike that less than half of it is padding, unless a call costs more."""
    import numpy as np

    array = np.array(lengths)
    parts = branch_attention._alike(array)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    for some in parts:
        longest = int(array[some].max())
        if longest**2 // 2 >= branch_attention._LONE_PAIRS:
            assert len(some) == 1
        wasted = (longest**2 - array[some] ** 2)[4 * array[some] <= 3 * longest].sum() // 2
        assert wasted <= branch_attention._CALL_PAIRS * len(some)

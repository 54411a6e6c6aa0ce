"""Compares attention without a mask with attention under a dense mask, over trees of any depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from branches import cpu_branch_only
from forests import Forest, check_ranks, dense_attention, forests, random_rows, sharded, two_level
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_core.train.context_parallel import WHOLE, RowSharding
from relax_core.train.model import branch_attention
from relax_core.train.model.branch_attention import BranchPlan
from relax_core.train.model.tree_attention import MaskedGrid, attention_over
from tests.train.rank_server import run_ranks

torch.set_num_threads(1)
CPU = torch.device("cpu")


def always_planned(forest: Forest, *, dtype: torch.dtype, sharding: RowSharding = WHOLE, padded: int = 0) -> BranchPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "MASKLESS_SAVES_PAIRS", -(10**12))
        plan = BranchPlan.of(forest.end, dtype=dtype, sharding=sharding, padded=padded)
    assert plan is not None
    return plan


def output_and_gradients(output: Tensor, inputs: list[Tensor], incoming: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, incoming)]


@settings(max_examples=100, deadline=None)
@given(
    forest=forests(),
    pads=st.integers(0, 3),
    scale=st.sampled_from([None, 0.1, 2.0]),
    lone_pairs=st.sampled_from([1, 50, 2**17]),
    call_pairs=st.sampled_from([0, 100, 2**13]),
    call_bytes=st.sampled_from([1, 2**23]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_dense_attention(
    forest: Forest, pads: int, scale: float | None, lone_pairs: int, call_pairs: int, call_bytes: int, seed: int
) -> None:
    """The result does not depend on the grouping of runs and heads into calls, or on padding after the stream."""
    rows = len(forest.parents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "_LONE_PAIRS", lone_pairs)
        patch.setattr(branch_attention, "_CALL_PAIRS", call_pairs)
        patch.setattr(branch_attention, "_CALL_BYTES", call_bytes)
        plan = always_planned(forest, dtype=torch.float64)
        *inputs, incoming = random_rows(rows + pads, dtype=torch.float64, seed=seed)
        incoming[rows:] = 0  # the result of a padding row is not used
        planned = output_and_gradients(plan.attend(*inputs, scale=scale), inputs, incoming)
    expected = dense_attention(*(tensor[:rows] for tensor in inputs), forest.sees, scale=scale)
    dense = output_and_gradients(expected, inputs, incoming[:rows])
    for mine, right in zip([planned[0][:rows], *planned[1:]], dense, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(case=sharded(), lone_pairs=st.sampled_from([1, 50, 2**17]))
def test_context_parallel_ranks_make_the_dense_attention(case: tuple[Forest, int, int, int], lone_pairs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "_LONE_PAIRS", lone_pairs)
        check_ranks(
            case,
            lambda forest, sharding, padded: always_planned(
                forest, dtype=torch.float64, sharding=sharding, padded=padded
            ),
        )


def test_two_ranks_exchange_keys_head_by_head(tmp_path: Path) -> None:
    ended = run_ranks("gathered_keys_rank.py", [(tmp_path,)] * 2)
    assert all(status == 0 for status, _ in ended), ended
    forest = two_level([[60, 7], [50, 3]], [30, 20])
    rows = len(forest.parents)
    padded = RowSharding(multiple=4, ranks=2).padded(rows)
    *inputs, incoming = random_rows(padded, dtype=torch.float64, seed=3)
    expected = dense_attention(*(tensor[:rows] for tensor in inputs), forest.sees, scale=None)
    dense = output_and_gradients(expected, inputs, incoming[:rows])
    for rank in range(2):
        mine, found = torch.load(tmp_path / f"{rank}.pt")
        real = mine[mine < rows]
        for part, right in zip(found, dense, strict=True):
            torch.testing.assert_close(part[: len(real)], right[real], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    forest = two_level([[60, 7, 33], [50], [1, 20]], [200, 90, 15])
    *inputs, incoming = random_rows(len(forest.parents), dtype=dtype, seed=0)
    plan = always_planned(forest, dtype=dtype)
    planned = output_and_gradients(plan.attend(*inputs, scale=None), inputs, incoming)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    dense = output_and_gradients(dense_attention(*exact, forest.sees, scale=None), exact, incoming.double())
    grid = MaskedGrid.of(forest.end, pads=0, device=CPU, dtype=dtype)
    masked = output_and_gradients(grid.attend(*inputs, scale=None), inputs, incoming)
    torch.testing.assert_close(planned[0].double(), dense[0], rtol=0, atol=4 * tolerance)
    for mine, expected in zip(planned, masked, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=4 * tolerance)


def calls_by_hand(forest: Forest) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, int]]]:
    """Returns the calls of ``causal`` and ``above``. A call has the first row and the end row of queries and keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_attention, "_LONE_PAIRS", 0)  # each run gets a separate call
        plan = always_planned(forest, dtype=torch.float32)
    causal, above = [], []
    for part in (*plan.causal, *plan.above):
        queries, keys = part.queries.rows, part.keys.rows
        assert isinstance(queries, slice) and isinstance(keys, slice)
        if part.causal:
            causal.append((queries.start, queries.stop))
        else:
            above.append((queries.start, queries.stop, keys.start, keys.stop))
    return sorted(causal), sorted(above)


def test_two_levels_by_hand() -> None:
    """Prompts of 4 and 6 tokens have branches of 2 and 5. A single branch of 3 tokens continues its prompt's run."""
    causal, above = calls_by_hand(two_level([[3, 6], [4], [1, 1]], [4, 6, 2]))
    assert causal == [(0, 4), (4, 6), (6, 11), (11, 20), (20, 22)]
    assert above == [(4, 11, 0, 4)]


def test_a_deep_tree_by_hand() -> None:
    """Rows 0-2 branch to 3-4 and 8-9, rows 3-4 branch to 5, 6 and 7, and a second root follows."""
    causal, above = calls_by_hand(Forest([-1, 0, 1, 2, 3, 4, 4, 4, 2, 8, -1, 10]))
    assert causal == [(0, 3), (3, 5), (5, 6), (6, 7), (7, 8), (8, 10), (10, 12)]
    assert above == [(3, 10, 0, 3), (5, 8, 3, 5)]


@settings(max_examples=50, deadline=None)
@given(forests())
def test_only_pairs_that_see_each_other_are_computed(forest: Forest) -> None:
    """Each run has a separate call. `BranchPlan.pairs` counts a causal run as half a square."""
    causal, above = calls_by_hand(forest)
    pairs = sum((end - start) * (end - start + 1) // 2 for start, end in causal)
    pairs += sum((end - start) * (last - first) for start, end, first, last in above)
    assert pairs == forest.sees.sum()


@cpu_branch_only("a GPU always takes FlexAttention")
@pytest.mark.parametrize(
    ("lengths", "prompt", "planned"),
    [
        ([[8] * 16] * 8, 17, False),  # for the demo, more calls would cost more time than they save
        ([[100] * 8] * 2, 64, True),
        ([[50]] * 4, 30, False),
        ([[500]] * 4, 30, True),
        ([[30] * 4], 600, True),
    ],
)
def test_which_way_is_taken(lengths: list[list[int]], prompt: int, planned: bool) -> None:
    end = two_level(lengths, [prompt] * len(lengths)).end
    way = attention_over(end, WHOLE, padded=len(end), device=CPU, dtype=torch.float32)
    assert isinstance(way, BranchPlan if planned else MaskedGrid)


@pytest.mark.parametrize("rows", [3000, 1100, 200])
def test_all_ranks_take_the_same_way(rows: int) -> None:
    """Implementations gather keys in different calls: ranks that mix them would deadlock. One rank has only padding."""
    end = two_level([[rows // 10] * 5], [rows // 2]).end
    shardings = [RowSharding(multiple=8, ranks=4, rank=rank) for rank in range(4)]
    for padded in (shardings[0].padded(len(end)), 8 * len(end)):
        ways = {
            type(attention_over(end, sharding, padded=padded, device=CPU, dtype=torch.float32))
            for sharding in shardings
        }
        assert len(ways) == 1


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(8, 2, 64), (8, 8, 64), (4, 4, 16), (32, 2, 128), (6, 3, 1)])
def test_a_call_has_few_heads(heads: int, key_heads: int, dim: int) -> None:
    """Every head is in one call. The keys of a call take at most `_CALL_BYTES`, unless the call has one head."""
    rows = 16384 + 8 * 512
    plan = BranchPlan.of(two_level([[512] * 8], [16384]).end, dtype=torch.float32)
    assert plan is not None
    query, key = (torch.empty(rows, count, dim, device="meta") for count in (heads, key_heads))
    found = [(keys, some) for keys, of_keys in plan.head_ranges(query, key) for some in of_keys]
    assert [head for _, some in found for head in range(some.start, some.stop)] == list(range(heads))
    for keys, some in found:
        count = some.stop - some.start
        assert count == 1 or count * rows * dim * 4 <= branch_attention._CALL_BYTES
        of_heads = {head * key_heads // heads for head in range(some.start, some.stop)}
        assert of_heads == set(range(keys.start, keys.stop))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_runs_that_go_together(lengths: list[int]) -> None:
    """Each run is in exactly one call. Less than half of a call is padding, unless a separate call costs more."""
    array = np.array(lengths)
    parts = branch_attention._alike(array)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    for some in parts:
        longest = int(array[some].max())
        if longest**2 // 2 >= branch_attention._LONE_PAIRS:
            assert len(some) == 1
        wasted = (longest**2 - array[some] ** 2)[4 * array[some] <= 3 * longest].sum() // 2
        assert wasted <= branch_attention._CALL_PAIRS * len(some)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.lists(st.integers(2, 300), min_size=2, max_size=4)), min_size=1, max_size=9
    )
)
def test_parents_that_go_together(groups: list[tuple[int, list[int]]]) -> None:
    """Each parent is in one call. A call pads at most as many pairs as separate calls of its members would cost."""
    plan = always_planned(
        two_level([lengths for _, lengths in groups], [prompt for prompt, _ in groups]), dtype=torch.float32
    )
    branches = [(prompt, sum(lengths) - len(lengths)) for prompt, lengths in groups]
    assert sum(part.keys.count for part in plan.above) == len(groups)
    padded = sum(part.queries.count * part.queries.width * part.keys.width for part in plan.above)
    assert padded - sum(p * b for p, b in branches) <= branch_attention._CALL_PAIRS * (len(groups) - len(plan.above))

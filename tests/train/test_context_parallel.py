"""Tests the rows of context-parallel ranks: each row has one rank, and ranks have equal work."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_trainer import make_groups

from relax_core.train.context_parallel import RowSharding, TokenSharding
from relax_core.train.micro_batches import pack_tree
from relax_core.train.model.tree_attention import TreeBatch

# Numbers of context-parallel ranks, and of tensor-parallel ranks with sequence parallelism.
CUTS = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4]))


def all_shardings(ranks: int, parts: int) -> list[RowSharding]:
    multiple = parts * (2 * ranks if ranks > 1 else 1)
    return [RowSharding(multiple=multiple, ranks=ranks, rank=rank) for rank in range(ranks)]


@given(CUTS, st.integers(1, 200))
def test_every_row_is_on_one_rank(sizes: tuple[int, int], rows: int) -> None:
    ranks, parts = sizes
    shardings = all_shardings(ranks, parts)
    padded = shardings[0].padded(rows)
    assert rows <= padded < rows + shardings[0].multiple
    held = [sharding.rows_of_rank(padded) for sharding in shardings]
    assert sorted(np.concatenate(held)) == list(range(padded))
    assert {len(own_rows) for own_rows in held} == {padded // ranks}
    assert (padded // ranks) % parts == 0
    np.testing.assert_array_equal(np.concatenate(held)[shardings[0].gathered_order(padded)], np.arange(padded))


@given(st.integers(2, 5), st.integers(1, 20))
def test_ranks_see_equally_much(ranks: int, chunk: int) -> None:
    """With a causal mask, row i attends to i + 1 rows."""
    padded = 2 * ranks * chunk
    seen = {int((sharding.rows_of_rank(padded) + 1).sum()) for sharding in all_shardings(ranks, 1)}
    assert len(seen) == 1


@given(st.integers(2, 5), st.integers(1, 200))
def test_owners_own_their_rows(ranks: int, rows: int) -> None:
    shardings = all_shardings(ranks, 1)
    padded = shardings[0].padded(rows)
    for sharding in shardings:
        assert (sharding.owners(sharding.rows_of_rank(padded), padded) == sharding.rank).all()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_tokens_find_back_into_order(owners: list[int]) -> None:
    """The parity test with cp=2 covers the gather itself. This test covers the gather's indices for any owners."""
    ranks, token = 3, torch.arange(len(owners)) + 100
    device = torch.device("cpu")
    row_shardings = [RowSharding(ranks=ranks, rank=rank) for rank in range(ranks)]
    shardings = [TokenSharding.of(np.array(owners), sharding, device) for sharding in row_shardings]
    parts = torch.zeros(ranks, shardings[0].longest, dtype=torch.int64)
    for part, sharding in zip(parts, shardings, strict=True):
        part[: len(sharding.mine)] = token[sharding.mine]
    assert torch.equal(parts.flatten()[shardings[0].gathered], token)


def test_a_rank_of_pads_alone_has_rows_and_finite_attention() -> None:
    layout = pack_tree(make_groups([[1]], prompt_lengths=[1]))
    for sharding in all_shardings(2, 1):
        tree = TreeBatch.of(layout, device=torch.device("cpu"), dtype=torch.float32, sharding=sharding)
        assert len(tree.token_ids) == 2
        query, key, value = (torch.randn(rows, 1, 8) for rows in (2, 4, 4))
        assert tree.attention.attend(query, key, value, scale=None).isfinite().all()
        assert len(tree.predicting_rows) == (1 if sharding.rank == 0 else 0)

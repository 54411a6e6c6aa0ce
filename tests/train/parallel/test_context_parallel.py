"""The rows of context-parallel ranks: every row once, equally many, early and late ones together."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_trainer import make_groups

from relax_core.train.attention.tree_attention import MaskedGrid, TreeBatch
from relax_core.train.packing.tree_packing import pack_tree
from relax_core.train.parallel.context_parallel import RowCut, TokenCut

CUTS = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4]))  # context-parallel ranks; tensor-parallel ones with SP


def all_cuts(ranks: int, parts: int) -> list[RowCut]:
    multiple = parts * (2 * ranks if ranks > 1 else 1)
    return [RowCut(multiple=multiple, ranks=ranks, rank=rank) for rank in range(ranks)]


@given(CUTS, st.integers(1, 200))
def test_every_row_is_on_one_rank(sizes: tuple[int, int], rows: int) -> None:
    ranks, parts = sizes
    cuts = all_cuts(ranks, parts)
    padded = cuts[0].padded(rows)
    assert rows <= padded < rows + cuts[0].multiple
    held = [cut.rows_of_rank(padded) for cut in cuts]
    assert sorted(np.concatenate(held)) == list(range(padded))
    assert {len(one) for one in held} == {padded // ranks}
    assert (padded // ranks) % parts == 0
    np.testing.assert_array_equal(np.concatenate(held)[cuts[0].gathered_order(padded)], np.arange(padded))


@given(st.integers(2, 5), st.integers(1, 20))
def test_ranks_see_equally_much(ranks: int, chunk: int) -> None:
    """Causally a row sees as many rows as its number says, and one."""
    padded = 2 * ranks * chunk
    seen = {int((cut.rows_of_rank(padded) + 1).sum()) for cut in all_cuts(ranks, 1)}
    assert len(seen) == 1


@given(st.integers(2, 5), st.integers(1, 200))
def test_owners_own_their_rows(ranks: int, rows: int) -> None:
    cuts = all_cuts(ranks, 1)
    padded = cuts[0].padded(rows)
    for cut in cuts:
        assert (cut.owners(cut.rows_of_rank(padded), padded) == cut.rank).all()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_tokens_find_back_into_order(owners: list[int]) -> None:
    """The gather itself is held by the parity of cp=2; here its bookkeeping, for any owners."""
    ranks, token = 3, torch.arange(len(owners)) + 100
    cuts = [TokenCut.of(np.array(owners), RowCut(ranks=ranks, rank=rank), torch.device("cpu")) for rank in range(ranks)]
    parts = torch.zeros(ranks, cuts[0].longest, dtype=torch.int64)
    for part, cut in zip(parts, cuts, strict=True):
        part[: len(cut.mine)] = token[cut.mine]
    assert torch.equal(parts.flatten()[cuts[0].gathered], token)


def test_a_rank_of_pads_alone_has_rows_and_a_finite_mask() -> None:
    layout = pack_tree(make_groups([[1]], prompt_lengths=[1]))
    for cut in all_cuts(2, 1):
        tree = TreeBatch.of(layout, device=torch.device("cpu"), dtype=torch.float32, cut=cut)
        assert len(tree.token_ids) == 2
        assert isinstance(tree.attention, MaskedGrid)
        assert tree.attention.mask.isfinite().any(-1).all()
        assert len(tree.predicting_rows) == (1 if cut.rank == 0 else 0)

"""Micro-batches: the same whatever the leases were, nothing lost, ranks balanced."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import MicroBatcher, split_over_ranks


def group_of(place: int, tokens: int) -> TokenTree:
    """A group with exactly ``tokens`` packed token rows: one sample, its last token is not computed."""
    return TokenTree(
        group_uid=f"g{place}",
        prompt_ids=np.zeros(1, dtype=np.int32),
        lengths=np.asarray([tokens], dtype=np.int64),
        response_ids=np.zeros(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=bool),
        rollout_logprobs=np.zeros(tokens, dtype=np.float32),
    )


def names(batches: list[list[TokenTree]]) -> list[list[str]]:
    return [[group.group_uid for group in batch] for batch in batches]


groups = st.lists(st.integers(1, 40), max_size=30).map(
    lambda sizes: [group_of(place, tokens) for place, tokens in enumerate(sizes)]
)


def batches_of(found: list[TokenTree], cuts: list[int], budget: int, ranks: int) -> list[list[TokenTree]]:
    batcher = MicroBatcher(budget, ranks=ranks)
    batches: list[list[TokenTree]] = []
    edges = [0, *sorted(cut % (len(found) + 1) for cut in cuts), len(found)]
    for start, end in pairwise(edges):
        batches += batcher.add(found[start:end])
    return [*batches, batcher.flush()]


def fits(groups: list[TokenTree], budget: int, ranks: int) -> bool:
    return all(
        sum(group.packed_tokens for group in share) <= budget or len(share) == 1
        for share in split_over_ranks(groups, ranks)
    )


@given(
    found=groups,
    cuts=st.lists(st.integers(0, 30), max_size=6),
    budget=st.integers(1, 100),
    ranks=st.integers(1, 4),
)
def test_batches_do_not_depend_on_how_the_groups_came(
    found: list[TokenTree], cuts: list[int], budget: int, ranks: int
) -> None:
    batches = batches_of(found, cuts, budget, ranks)
    assert names(batches) == names(batches_of(found, [], budget, ranks))
    assert [uid for batch in names(batches) for uid in batch] == [group.group_uid for group in found]
    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        assert fits(batch, budget, ranks)  # on every rank
        if following:
            assert not fits([*batch, following[0]], budget, ranks)  # it was full


def test_by_hand() -> None:
    found = [group_of(place, tokens) for place, tokens in enumerate([4, 6, 1, 20, 3, 3])]
    assert names(batches_of(found, [2], 10, 1)) == [["g0", "g1"], ["g2"], ["g3"], ["g4", "g5"]]
    # Two ranks: 4 | 6, then 6 | 4 + 1; the 20 finds no rank alone. 20 | 3 + 3 do: the larger one is a rank's only one.
    assert names(batches_of(found, [2], 10, 2)) == [["g0", "g1", "g2"], ["g3", "g4", "g5"]]


def test_no_rank_gets_more_than_the_budget() -> None:
    """195 rows would fit two ranks of 100, but not when cut by groups."""
    found = [group_of(place, tokens) for place, tokens in enumerate([70, 65, 60])]
    assert names(batches_of(found, [], 100, 2)) == [["g0", "g1"], ["g2"]]


@given(found=groups, ranks=st.integers(1, 5))
def test_a_split_loses_nothing_keeps_the_order_and_balances(found: list[TokenTree], ranks: int) -> None:
    shares = split_over_ranks(found, ranks)
    assert len(shares) == ranks
    places = [[int(uid[1:]) for uid in share] for share in names(shares)]
    assert all(mine == sorted(mine) for mine in places)
    assert sorted(place for mine in places for place in mine) == list(range(len(found)))
    loads = [sum(group.packed_tokens for group in share) for share in shares]
    largest = max((group.packed_tokens for group in found), default=0)
    # Longest first, each to the least loaded (Graham 1969): two ranks never differ by more than one group.
    assert max(loads) - min(loads) <= largest


def test_a_split_by_hand() -> None:
    found = [group_of(place, tokens) for place, tokens in enumerate([2, 7, 3, 5, 4])]
    # 7 → rank 0, 5 → rank 1, 4 → rank 1 (9), 3 → rank 0 (10), 2 → rank 1 (11)
    assert names(split_over_ranks(found, 2)) == [["g1", "g2"], ["g0", "g3", "g4"]]
    assert names(split_over_ranks(found[:1], 3)) == [["g0"], [], []]

"""Tests that micro-batches do not depend on leases, lose nothing, keep the budget and balance the ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import MicroBatcher, piece_of, split_over_ranks
from relax_core.train.step_sums import micro_batch_totals
from tests.trees import answers_tree, path_of, random_tree


def group_of(place: int, *tokens: int, prompt: int = 1) -> TokenTree:
    """Makes a group with an answer of each number of ``tokens``; the last token of an answer is not computed."""
    return answers_tree(f"g{place}", np.zeros(prompt), tokens, np.zeros(sum(tokens)))


def names(batches: list[list[TokenTree]]) -> list[list[str]]:
    """Returns a group's uid if the group is whole, and otherwise its episodes' uids."""
    return [
        [uid for tree in batch for uid in ([tree.group_uid] if whole(tree) else [one.uid for one in tree.episodes])]
        for batch in batches
    ]


def whole(tree: TokenTree) -> bool:
    return tree.counts_group and len(tree.episodes) == 1


def episodes_of(batches: list[list[TokenTree]]) -> list[list[str]]:
    return [[one.uid for tree in batch for one in tree.episodes] for batch in batches]


@st.composite
def forests(draw: st.DrawFn, *, most: int = 8) -> list[TokenTree]:
    """Draws groups of one or several answers, and random trees."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    found = []
    for place in range(draw(st.integers(0, most))):
        if draw(st.booleans()):
            found.append(random_tree(random, uid=f"g{place}", turns=2, roots=draw(st.integers(1, 2))))
        else:
            lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
            found.append(group_of(place, *lengths, prompt=draw(st.integers(1, 20))))
    return found


def batches_of(found: list[TokenTree], cuts: list[int], budget: int, ranks: int) -> list[list[TokenTree]]:
    batcher = MicroBatcher(budget, ranks=ranks)
    batches: list[list[TokenTree]] = []
    edges = [0, *sorted(cut % (len(found) + 1) for cut in cuts), len(found)]
    for start, end in pairwise(edges):
        batches += batcher.add(found[start:end])
    return [*batches, batcher.flush()]


Paths = list[set[tuple[str, int]]]  # For each episode in order: the (group, row) pairs that it needs computed.


def paths_of(trees: list[TokenTree]) -> Paths:
    """Returns all rows on the way to a leaf except the leaf itself, by the definition of ``end``."""
    return [
        {(tree.group_uid, int(row)) for leaf in one.leaves for row in path_of(tree, leaf)[:-1]}
        for tree in trees
        for one in tree.episodes
    ]


def load(paths: Paths) -> int:
    """Returns the number of rows that a rank computes for these episodes."""
    return len(set().union(*paths))


@settings(max_examples=60, deadline=None)
@given(
    found=forests(),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    budget=st.integers(1, 150),
    ranks=st.integers(1, 4),
)
def test_batches_hold_the_budget_lose_nothing_and_do_not_depend_on_how_the_groups_came(
    found: list[TokenTree], cuts: list[int], budget: int, ranks: int
) -> None:
    batches = batches_of(found, cuts, budget, ranks)
    uids = episodes_of(batches)
    assert uids == episodes_of(batches_of(found, [], budget, ranks))
    assert [uid for batch in uids for uid in batch] == [one.uid for tree in found for one in tree.episodes]
    by_uid = dict(zip([one.uid for tree in found for one in tree.episodes], paths_of(found), strict=True))
    for batch in batches:
        for share in split_over_ranks(batch, ranks):
            rows = sum(tree.computed_rows for tree in share)
            assert rows == load([by_uid[one.uid] for tree in share for one in tree.episodes])
            assert rows <= budget or sum(len(tree.episodes) for tree in share) == 1
    trained = sum(bool(tree.loss_mask.any()) for tree in found)
    assert sum(micro_batch_totals(batch).groups for batch in batches) == trained
    over_ranks = [share for batch in batches for share in split_over_ranks(batch, ranks)]
    totals = [micro_batch_totals(share) for share in over_ranks]
    assert sum(one.groups for one in totals) == trained
    expected = micro_batch_totals(found)
    assert sum(one.samples for one in totals) == expected.samples
    assert sum(one.tokens for one in totals) == expected.tokens


@settings(max_examples=60, deadline=None)
@given(found=forests(), budget=st.integers(1, 150), ranks=st.integers(1, 4))
def test_a_batch_is_closed_only_where_the_next_tree_or_episode_would_not_fit(
    found: list[TokenTree], budget: int, ranks: int
) -> None:
    uids = episodes_of(batches_of(found, [], budget, ranks))
    by_uid = dict(zip([one.uid for tree in found for one in tree.episodes], paths_of(found), strict=True))
    tree_of = {tree.episodes[0].uid: tree for tree in found}
    for batch, following in pairwise(uids):
        assert batch
        if following:  # The open micro-batch at the end is empty if there was nothing to add.
            first = following[0]
            more = [one.uid for one in tree_of[first].episodes] if first in tree_of else [first]
            assert bins_needed([by_uid[uid] for uid in [*batch, *more]], budget) > ranks


def bins_needed(paths: Paths, budget: int) -> int:
    """Returns the fewest ranks that these episodes need in order; an episode above the budget has a rank of its own."""
    bins, own = 1, Paths()
    for path in paths:
        if own and load([*own, path]) > budget:
            bins, own = bins + 1, []
        own.append(path)
    return bins


def test_by_hand() -> None:
    found = [group_of(place, tokens) for place, tokens in enumerate([4, 6, 1, 20, 3, 3])]
    assert names(batches_of(found, [2], 10, 1)) == [["g0", "g1"], ["g2"], ["g3"], ["g4", "g5"]]
    # Two ranks take 4 + 6 | 1, and 20 then finds no free rank. They take 20 | 3 + 3, because 20 has a rank of its own.
    assert names(batches_of(found, [2], 10, 2)) == [["g0", "g1", "g2"], ["g3", "g4", "g5"]]


def test_a_group_that_is_larger_than_the_budget_is_cut_by_episodes() -> None:
    """A trunk of 6 rows has answers of 5 computed rows, the last one of 1; a micro-batch of 16 holds two of them."""
    big = group_of(1, 6, 6, 6, 6, 2, prompt=6)
    batches = batches_of([group_of(0, 3), big, group_of(2, 4)], [], 16, 1)
    assert names(batches) == [["g0"], ["g1.0", "g1.1"], ["g1.2", "g1.3"], ["g1.4", "g2"]]
    assert [[tree.computed_rows for tree in batch] for batch in batches] == [[3], [16], [16], [7, 4]]
    assert [tree.counts_group for batch in batches for tree in batch] == [True, True, False, False, True]
    # Two ranks take 4 answers at a time, as evenly as their order allows.
    batches = batches_of([big], [], 16, 2)
    assert names(batches) == [["g1.0", "g1.1", "g1.2", "g1.3"], ["g1.4"]]
    assert names(split_over_ranks(batches[0], 2)) == [["g1.0", "g1.1"], ["g1.2", "g1.3"]]


def test_the_first_piece_with_a_trained_row_counts_as_the_group() -> None:
    mask = [False] * 4 + [True] * 4
    big = answers_tree("g0", np.zeros(6), [2, 2, 2, 2], np.zeros(8), loss_mask=mask)
    batches = batches_of([big], [], 8, 1)
    assert names(batches) == [["g0.0", "g0.1"], ["g0.2", "g0.3"]]
    assert [tree.counts_group for batch in batches for tree in batch] == [False, True]


def test_no_rank_gets_more_than_the_budget() -> None:
    """195 rows would fit two ranks of 100, but not when they are split between episodes."""
    found = [group_of(place, tokens) for place, tokens in enumerate([70, 65, 60])]
    assert names(batches_of(found, [], 100, 2)) == [["g0", "g1"], ["g2"]]


@settings(max_examples=100, deadline=None)
@given(found=forests(most=3), ranks=st.integers(1, 4))
def test_a_split_loses_nothing_keeps_the_order_and_its_largest_share_is_minimal(
    found: list[TokenTree], ranks: int
) -> None:
    shares = split_over_ranks(found, ranks)
    assert len(shares) == ranks
    paths = paths_of(found)
    assert [uid for share in episodes_of(shares) for uid in share] == [one.uid for t in found for one in t.episodes]
    count = len(paths)
    if not count:
        return
    loads = {(first, behind): load(paths[first:behind]) for first in range(count) for behind in range(first, count + 1)}
    # Bounds the largest share of this many episodes.
    least = [0, *(loads[0, behind] for behind in range(1, count + 1))]
    for _ in range(ranks - 1):
        least = [
            min([least[behind], *(max(least[first], loads[first, behind]) for first in range(behind))])
            for behind in range(count + 1)
        ]
    assert max(sum(tree.computed_rows for tree in share) for share in shares) == least[-1]


def test_a_split_by_hand() -> None:
    found = [group_of(place, tokens) for place, tokens in enumerate([2, 7, 3, 5, 4])]
    # The shares are 12 | 9; the next best split is 13.
    assert names(split_over_ranks(found, 2)) == [["g0", "g1", "g2"], ["g3", "g4"]]
    assert names(split_over_ranks(found, 3)) == [["g0", "g1"], ["g2", "g3"], ["g4"]]  # The shares are 9 | 8 | 4.
    assert names(split_over_ranks(found[:1], 3)) == [["g0"], [], []]


def test_pieces_tell_which_rows_others_have_too() -> None:
    """A prompt of 3 with four answers of 2 is split into pieces, and each row is new in exactly one piece."""
    (tree,) = [answers_tree("g", np.zeros(3), [2] * 4, np.zeros(8))]
    first, second, third = (piece_of(tree, *ends) for ends in ((0, 1), (1, 3), (3, 4)))
    assert first.extras["repeated"].tolist() == [False] * 5
    assert second.extras["repeated"].tolist() == [True] * 3 + [False] * 4
    assert third.extras["repeated"].tolist() == [True] * 3 + [False] * 2
    assert piece_of(second, 1, 2).extras["repeated"].tolist() == [True] * 3 + [False] * 2
    assert piece_of(tree, 0, 4) is tree

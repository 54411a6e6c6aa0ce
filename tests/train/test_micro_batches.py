"""Tests that micro-batches are independent of leases, lose no rows, stay within the budget and balance the ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.tree import OF_DATA, TokenTree
from relax_core.train.megatron_rank import micro_batch_totals
from relax_core.train.micro_batches import MicroBatcher, decode_train_tree, piece_of, split_over_ranks
from tests.trees import answer_ids, answers_tree, of_tokens, path_of, prompt_of, random_tree, with_tokens

Spans = list[tuple[int, int]]  # each item is (tokens, version)


def group(*samples: Spans, mask: list[int] | None = None) -> TokenTree:
    """Makes samples of these spans. The token ids of sample i start at 100 i. ``mask`` covers all tokens."""
    lengths = [sum(tokens for tokens, _ in spans) for spans in samples]
    return answers_tree(
        "g",
        [7, 8, 9],
        lengths,
        list(chain.from_iterable(range(100 * place, 100 * place + length) for place, length in enumerate(lengths))),
        logprobs=[-0.5 - place - token for place, length in enumerate(lengths) for token in range(length)],
        loss_mask=True if mask is None else np.array(mask, dtype=bool),
        versions=[version for spans in samples for tokens, version in spans for _ in range(tokens)],
        rewards=range(len(samples)),
    )


def row(tree: TokenTree, **extras: np.ndarray) -> Group:
    """Leases the group with advantages 0, 1, 2 and so on, and with the versions that `complete_group` returns."""
    advantages = np.arange(len(tree.tokens[1]), dtype=np.float32)
    columns = c.encode_tree(with_tokens(tree, advantages=advantages, **extras))
    uids = [episode.uid for episode in tree.episodes]
    versions = tree.oldest_versions(trained=True).tolist()
    return Group(group_uid=tree.group_uid, index=0, uids=uids, versions=versions, columns=columns)


def mask_of(tree: TokenTree) -> list[bool]:
    mask: list[bool] = of_tokens(tree, tree.loss_mask).tolist()
    return mask


def test_everything_arrives_flat_and_in_order() -> None:
    tree, masked = decode_train_tree(row(group([(2, 5)], [(3, 5)])), step=5, oldest_version=5)
    assert masked == {}
    assert prompt_of(tree).tolist() == [7, 8, 9]
    assert tree.lengths.tolist() == [2, 3]
    assert answer_ids(tree).tolist() == [0, 1, 100, 101, 102]
    assert of_tokens(tree, tree.logprobs).tolist() == [-0.5, -1.5, -1.5, -2.5, -3.5]
    assert tree.extras["advantages"].tolist() == [0, 1, 2, 3, 4]
    assert all(mask_of(tree)) and tree.loss_mask.dtype == bool
    assert tree.extras.keys() == {"advantages", "on_policy"}
    assert tree.computed_rows == 3 + 1 + 2


def test_columns_of_other_roles_are_kept_apart() -> None:
    leased = row(
        group([(2, 0)], [(1, 0)]),
        old_logprobs=np.arange(3, dtype=np.float32) - 1,
        teacher_logprobs=np.arange(3, dtype=np.float32) + 1,
        values=np.arange(3, dtype=np.float32) + 2,
        returns=np.arange(3, dtype=np.float32) + 3,
        teacher_top_ids=np.arange(6, dtype=np.int32).reshape(3, 2),  # two numbers per token
        teacher_top_logprobs=-np.arange(6, dtype=np.float32).reshape(3, 2),
    )
    tree, _ = decode_train_tree(leased, step=0, oldest_version=0)
    expected = {
        "teacher_logprobs": [1, 2, 3],
        "old_logprobs": [-1, 0, 1],
        "values": [2, 3, 4],
        "returns": [3, 4, 5],
        "teacher_top_ids": [[0, 1], [2, 3], [4, 5]],
        "teacher_top_logprobs": [[0, -1], [-2, -3], [-4, -5]],
    }
    for name, numbers in expected.items():
        column = tree.of_tokens(name)
        assert column is not None and column.tolist() == numbers, name
    assert tree.of_tokens("reference_logprobs") is None


def test_old_tokens_are_masked_one_by_one_and_what_is_left_with_none_is_told() -> None:
    leased = row(
        group(
            [(2, 1), (1, 2), (2, 3)],
            [(3, 1)],
            [(1, 3)],
            [(1, 2), (1, 3)],
            # The new token of the last sample is not trained, so no trained token remains.
            mask=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        )
    )
    tree, masked = decode_train_tree(leased, step=4, oldest_version=3)
    assert mask_of(tree) == [False, False, False, True, True, False, False, False, True, False, False]
    assert masked == {"g.1": "stale", "g.3": "stale"}


def test_an_episodes_age_is_that_of_its_oldest_token_on_any_segment() -> None:
    """Compares with brute force on random trees. Their episodes share sampled rows and have several segments."""
    for seed in range(20):
        tree = random_tree(np.random.default_rng(seed), uid="g", roots=2)
        tree = replace(tree, extras={})
        for trained in (False, True):
            expected = []
            for place in range(len(tree.episodes)):
                rows = tree.tokens[1][tree.tokens[0] == place]
                mine = rows[tree.loss_mask[rows]] if trained and tree.loss_mask[rows].any() else rows
                expected.append(int(tree.versions[mine].min()))
            assert tree.oldest_versions(trained=trained).tolist() == expected
        found, masked = decode_train_tree(row(tree), step=2, oldest_version=1)
        assert np.array_equal(found.loss_mask, tree.loss_mask & (tree.versions >= 1))
        ages = tree.oldest_versions(trained=False)
        assert np.array_equal(found.extras["on_policy"], (ages == 2)[found.tokens[0]])
        for place, episode in enumerate(tree.episodes):
            rows = tree.tokens[1][tree.tokens[0] == place]
            reason = None if found.loss_mask[rows].any() else "stale" if tree.loss_mask[rows].any() else "truncated"
            assert masked.get(episode.uid) == reason


def test_a_forward_pass_needs_no_more_than_its_columns() -> None:
    leased = row(group([(2, 5)], [(3, 4)]))
    some = {name: leased.columns[name] for name in c.FORWARD_COLUMNS}
    tree = c.decode_tree(Group(group_uid="g", index=0, uids=[], versions=[], columns=some))
    assert answer_ids(tree).tolist() == [0, 1, 100, 101, 102]
    assert tree.lengths.tolist() == [2, 3]
    assert all(mask_of(tree)) and not tree.logprobs.any()


def test_masked_tokens_of_older_weights_make_a_sample_old_for_the_gap() -> None:
    """With rollout.mask_off_policy only new tokens train, but the sample's KV cache began with older weights."""
    leased = row(group([(2, 4), (1, 5)], [(2, 5)], mask=[0, 0, 1, 1, 1]))
    assert leased.versions == [5, 5]
    tree, masked = decode_train_tree(leased, step=5, oldest_version=5)
    assert masked == {} and mask_of(tree) == [False, False, True, True, True]
    assert tree.extras["on_policy"].tolist() == [False] * 3 + [True] * 2


@pytest.mark.parametrize("column", [c.OLD_LOGPROBS, c.ADVANTAGES, c.TEACHER_TOP_IDS])
def test_a_column_of_another_number_of_rows_is_refused_with_its_group(column: str) -> None:
    leased = row(group([(2, 5)], [(3, 5)]))
    wrong = Group(group_uid="g", index=0, uids=[], versions=[5, 5], columns=leased.columns | {column: bytes(4 * 7)})
    with pytest.raises(ValueError, match=f"group g: column {column} has 7 numbers for"):
        decode_train_tree(wrong, step=5, oldest_version=5)


def group_of(place: int, *tokens: int, prompt: int = 1) -> TokenTree:
    """Makes a group with one answer for each number in ``tokens``. The last token of an answer has no computed row."""
    return answers_tree(f"g{place}", np.zeros(prompt), tokens, np.zeros(sum(tokens)))


def names(batches: list[list[TokenTree]]) -> list[list[str]]:
    """Returns for each tree the group's uid if the group is complete, and otherwise the uids of its episodes."""
    return [
        [
            uid
            for tree in batch
            for uid in ([tree.group_uid] if whole(tree) else [episode.uid for episode in tree.episodes])
        ]
        for batch in batches
    ]


def whole(tree: TokenTree) -> bool:
    return tree.counts_group and len(tree.episodes) == 1


def episodes_of(batches: list[list[TokenTree]]) -> list[list[str]]:
    return [[episode.uid for tree in batch for episode in tree.episodes] for batch in batches]


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


Paths = list[set[tuple[str, int]]]  # for each episode in order: the (group, row) pairs to compute


def paths_of(trees: list[TokenTree]) -> Paths:
    """Returns for each episode all rows on the paths to its leaves except the leaves, by the definition of ``end``."""
    return [
        {(tree.group_uid, int(row)) for leaf in episode.leaves for row in path_of(tree, leaf)[:-1]}
        for tree in trees
        for episode in tree.episodes
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
    assert [uid for batch in uids for uid in batch] == [episode.uid for tree in found for episode in tree.episodes]
    by_uid = dict(zip([episode.uid for tree in found for episode in tree.episodes], paths_of(found), strict=True))
    for batch in batches:
        for share in split_over_ranks(batch, ranks):
            rows = sum(tree.computed_rows for tree in share)
            assert rows == load([by_uid[episode.uid] for tree in share for episode in tree.episodes])
            assert rows <= budget or sum(len(tree.episodes) for tree in share) == 1
    trained = sum(bool(tree.loss_mask.any()) for tree in found)
    assert sum(micro_batch_totals(batch).groups for batch in batches) == trained
    over_ranks = [share for batch in batches for share in split_over_ranks(batch, ranks)]
    totals = [micro_batch_totals(share) for share in over_ranks]
    assert sum(total.groups for total in totals) == trained
    expected = micro_batch_totals(found)
    assert sum(total.samples for total in totals) == expected.samples
    assert sum(total.tokens for total in totals) == expected.tokens


@settings(max_examples=60, deadline=None)
@given(found=forests(), budget=st.integers(1, 150), ranks=st.integers(1, 4))
def test_a_batch_is_closed_only_where_the_next_tree_or_episode_would_not_fit(
    found: list[TokenTree], budget: int, ranks: int
) -> None:
    uids = episodes_of(batches_of(found, [], budget, ranks))
    by_uid = dict(zip([episode.uid for tree in found for episode in tree.episodes], paths_of(found), strict=True))
    tree_of = {tree.episodes[0].uid: tree for tree in found}
    for batch, following in pairwise(uids):
        assert batch
        if following:  # the last micro-batch is empty if no row was left
            first = following[0]
            more = [episode.uid for episode in tree_of[first].episodes] if first in tree_of else [first]
            assert bins_needed([by_uid[uid] for uid in [*batch, *more]], budget) > ranks


def bins_needed(paths: Paths, budget: int) -> int:
    """Returns how many ranks these episodes need in order. An episode above the budget gets a separate rank."""
    bins, own = 1, Paths()
    for path in paths:
        if own and load([*own, path]) > budget:
            bins, own = bins + 1, []
        own.append(path)
    return bins


def test_by_hand() -> None:
    found = [group_of(place, tokens) for place, tokens in enumerate([4, 6, 1, 20, 3, 3])]
    assert names(batches_of(found, [2], 10, 1)) == [["g0", "g1"], ["g2"], ["g3"], ["g4", "g5"]]
    # In the first micro-batch, two ranks take 4 + 6 | 1, and no rank is free for 20. In the second, they take 20 | 3 +
    # 3, because 20 needs a separate rank.
    assert names(batches_of(found, [2], 10, 2)) == [["g0", "g1", "g2"], ["g3", "g4", "g5"]]


def test_a_group_that_is_larger_than_the_budget_is_cut_by_episodes() -> None:
    """A prompt of 6 rows has four answers of 5 computed rows and one of 1. Two answers fit into 16 rows."""
    big = group_of(1, 6, 6, 6, 6, 2, prompt=6)
    batches = batches_of([group_of(0, 3), big, group_of(2, 4)], [], 16, 1)
    assert names(batches) == [["g0"], ["g1.0", "g1.1"], ["g1.2", "g1.3"], ["g1.4", "g2"]]
    assert [[tree.computed_rows for tree in batch] for batch in batches] == [[3], [16], [16], [7, 4]]
    assert [tree.counts_group for batch in batches for tree in batch] == [True, True, False, False, True]
    # Two ranks take 4 answers at a time and split them as evenly as the order allows.
    batches = batches_of([big], [], 16, 2)
    assert names(batches) == [["g1.0", "g1.1", "g1.2", "g1.3"], ["g1.4"]]
    assert names(split_over_ranks(batches[0], 2)) == [["g1.0", "g1.1"], ["g1.2", "g1.3"]]


def test_a_group_of_a_data_row_is_never_cut() -> None:
    """The loss compares the episodes of such a group. 40 rows exceed the budget, and the group stays whole."""
    pairs = [answers_tree(f"g{n}", np.zeros(6), [17, 17], np.zeros(34), engine=OF_DATA) for n in range(3)]

    def whole(parts: list[list[TokenTree]]) -> list[list[str]]:
        assert all(len(tree.episodes) == 2 for part in parts for tree in part)
        return [[tree.group_uid for tree in part] for part in parts]

    assert whole(batches_of(pairs, [], 16, 1)) == [["g0"], ["g1"], ["g2"]]
    assert whole(batches_of(pairs, [], 80, 1)) == [["g0", "g1"], ["g2"]]
    (batch,) = [batch for batch in batches_of(pairs, [], 1000, 2) if batch]
    assert whole(split_over_ranks(batch, 2)) == [["g0", "g1"], ["g2"]]
    assert whole(split_over_ranks(batch, 4)) == [["g0"], ["g1"], ["g2"], []]


def test_the_first_piece_with_a_trained_row_counts_as_the_group() -> None:
    mask = [False] * 4 + [True] * 4
    big = answers_tree("g0", np.zeros(6), [2, 2, 2, 2], np.zeros(8), loss_mask=mask)
    batches = batches_of([big], [], 8, 1)
    assert names(batches) == [["g0.0", "g0.1"], ["g0.2", "g0.3"]]
    assert [tree.counts_group for batch in batches for tree in batch] == [False, True]


def test_no_rank_gets_more_than_the_budget() -> None:
    """195 rows would fit two ranks of 100, but no split between two episodes fits."""
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
    assert [uid for share in episodes_of(shares) for uid in share] == [
        episode.uid for t in found for episode in t.episodes
    ]
    count = len(paths)
    if not count:
        return
    loads = {(first, behind): load(paths[first:behind]) for first in range(count) for behind in range(first, count + 1)}
    # The minimal largest share, by number of episodes.
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
    assert names(split_over_ranks(found, 3)) == [["g0", "g1"], ["g2", "g3"], ["g4"]]  # the shares are 9 | 8 | 4
    assert names(split_over_ranks(found[:1], 3)) == [["g0"], [], []]


def test_pieces_tell_which_rows_others_have_too() -> None:
    """A prompt of 3 rows with four answers of 2 is split into pieces. Each row is new in exactly one piece."""
    (tree,) = [answers_tree("g", np.zeros(3), [2] * 4, np.zeros(8))]
    first, second, third = (piece_of(tree, *ends) for ends in ((0, 1), (1, 3), (3, 4)))
    assert first.extras["repeated"].tolist() == [False] * 5
    assert second.extras["repeated"].tolist() == [True] * 3 + [False] * 4
    assert third.extras["repeated"].tolist() == [True] * 3 + [False] * 2
    assert piece_of(second, 1, 2).extras["repeated"].tolist() == [True] * 3 + [False] * 2
    assert piece_of(tree, 0, 4) is tree

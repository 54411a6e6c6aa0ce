"""Tests leased groups as the trainer's trees: on-policy tokens, masked old tokens, and episodes left without tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedGroup
from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import decode_train_tree
from tests.trees import answer_ids, answers_tree, of_tokens, prompt_of, random_tree, with_tokens

Spans = list[tuple[int, int]]  # Each span has its tokens and its version.


def group(*samples: Spans, mask: list[int] | None = None) -> TokenTree:
    """Makes samples of these spans; token ids are 100 times the sample's index and up. ``mask`` covers all tokens."""
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


def row(tree: TokenTree, **extras: np.ndarray) -> LeasedGroup:
    """Leases the group with advantages 0, 1, 2 and so on, and with the versions that `complete_group` returns."""
    advantages = np.arange(len(tree.tokens[1]), dtype=np.float32)
    columns = c.encode_tree(with_tokens(tree, advantages=advantages, **extras))
    uids = [one.uid for one in tree.episodes]
    versions = tree.oldest_versions(trained=True).tolist()
    return LeasedGroup(group_uid=tree.group_uid, index=0, uids=uids, versions=versions, columns=columns)


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
    old, reference = np.arange(3, dtype=np.float32) + 1, np.arange(3, dtype=np.float32) + 2
    leased = row(group([(2, 0)], [(1, 0)]), old_logprobs=old, reference_logprobs=reference)
    tree, _ = decode_train_tree(leased, step=0, oldest_version=0)
    for name, expected in (("old_logprobs", [1, 2, 3]), ("reference_logprobs", [2, 3, 4])):
        assert tree.extras[name].shape == (tree.rows,)
        column = tree.of_tokens(name)
        assert column is not None and column.tolist() == expected
    assert tree.of_tokens("values") is None


def test_teachers_and_critics_columns_arrive() -> None:
    leased = row(
        group([(2, 0)], [(1, 0)]),
        teacher_logprobs=np.arange(3, dtype=np.float32) + 1,
        values=np.arange(3, dtype=np.float32) + 2,
        returns=np.arange(3, dtype=np.float32) + 3,
        teacher_top_ids=np.arange(6, dtype=np.int32).reshape(3, 2),  # There are two numbers a token.
        teacher_top_logprobs=-np.arange(6, dtype=np.float32).reshape(3, 2),
    )
    tree, _ = decode_train_tree(leased, step=0, oldest_version=0)
    expected = {
        "teacher_logprobs": [1, 2, 3],
        "values": [2, 3, 4],
        "returns": [3, 4, 5],
        "teacher_top_ids": [[0, 1], [2, 3], [4, 5]],
        "teacher_top_logprobs": [[0, -1], [-2, -3], [-4, -5]],
    }
    for name, numbers in expected.items():
        column = tree.of_tokens(name)
        assert column is not None and column.tolist() == numbers, name


def test_a_sample_is_fresh_only_as_a_whole() -> None:
    """The second sample ended with the step's weights but began with older ones."""
    leased = row(group([(2, 5)], [(1, 4), (2, 5)], [(1, 4)]))
    tree, _ = decode_train_tree(leased, step=5, oldest_version=0)
    assert tree.extras["on_policy"].tolist() == [True, True, False, False, False, False]


def test_old_tokens_are_masked_one_by_one_and_what_is_left_with_none_is_told() -> None:
    leased = row(
        group(
            [(2, 1), (1, 2), (2, 3)],
            [(3, 1)],
            [(1, 3)],
            [(1, 2), (1, 3)],
            # The last sample's new token is not trained, so no trained token remains.
            mask=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        )
    )
    tree, masked = decode_train_tree(leased, step=4, oldest_version=3)
    assert mask_of(tree) == [False, False, False, True, True, False, False, False, True, False, False]
    assert masked == {"g.1": "stale", "g.3": "stale"}


def test_a_row_within_the_window_is_left_as_it_is() -> None:
    leased = row(group([(2, 3)], [(1, 4)], mask=[0, 1, 1]))
    tree, masked = decode_train_tree(leased, step=4, oldest_version=3)
    assert mask_of(tree) == [False, True, True]
    assert masked == {}


def test_an_episodes_age_is_that_of_its_oldest_token_on_any_segment() -> None:
    """Brute force on random trees agrees, whose episodes share sampled rows and have several segments."""
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
        for place, one in enumerate(tree.episodes):
            rows = tree.tokens[1][tree.tokens[0] == place]
            reason = None if found.loss_mask[rows].any() else "stale" if tree.loss_mask[rows].any() else "truncated"
            assert masked.get(one.uid) == reason


def test_a_forward_pass_needs_no_more_than_its_columns() -> None:
    leased = row(group([(2, 5)], [(3, 4)]))
    some = {name: leased.columns[name] for name in c.FORWARD_COLUMNS}
    tree = c.decode_tree(LeasedGroup(group_uid="g", index=0, uids=[], versions=[], columns=some))
    assert answer_ids(tree).tolist() == [0, 1, 100, 101, 102]
    assert tree.lengths.tolist() == [2, 3]
    assert all(mask_of(tree)) and not tree.logprobs.any()


def test_masked_tokens_of_older_weights_make_a_sample_old_for_the_gap() -> None:
    """With rollout.mask_off_policy it is trained with its newest version, but its cache began with an older one."""
    leased = row(group([(2, 4), (1, 5)], [(2, 5)], mask=[0, 0, 1, 1, 1]))
    assert leased.versions == [5, 5]
    tree, masked = decode_train_tree(leased, step=5, oldest_version=5)
    assert masked == {} and mask_of(tree) == [False, False, True, True, True]
    assert tree.extras["on_policy"].tolist() == [False] * 3 + [True] * 2


def test_a_sample_without_a_trained_token_was_truncated_whatever_its_age() -> None:
    """With rollout.mask_truncated it stays in the group for the baseline, and is neither trained nor stale."""
    leased = row(group([(2, 3)], [(2, 1), (1, 3)], [(3, 1)], mask=[1, 1, 0, 0, 0, 1, 1, 1]))
    tree, masked = decode_train_tree(leased, step=4, oldest_version=3)
    assert masked == {"g.1": "truncated", "g.2": "stale"}
    assert mask_of(tree) == [True, True] + [False] * 6
    young, masked = decode_train_tree(leased, step=1, oldest_version=0)
    assert masked == {"g.1": "truncated"} and mask_of(young) == [True] * 2 + [False] * 3 + [True] * 3


@pytest.mark.parametrize("column", [c.OLD_LOGPROBS, c.ADVANTAGES, c.TEACHER_TOP_IDS])
def test_a_column_of_another_number_of_rows_is_refused_with_its_group(column: str) -> None:
    leased = row(group([(2, 5)], [(3, 5)]))
    wrong = LeasedGroup(
        group_uid="g", index=0, uids=[], versions=[5, 5], columns=leased.columns | {column: bytes(4 * 7)}
    )
    with pytest.raises(ValueError, match=f"group g: column {column} has 7 numbers for"):
        decode_train_tree(wrong, step=5, oldest_version=5)

"""Compares the token tree with its definition by brute force: visibility, tokens, parts, refusals and columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.chains import chains_of
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.contracts.tree import Episode, TokenTree, Turn, check_tree
from tests.media_items import image_item
from tests.trees import answers_tree, path_of, random_tree, with_tokens

SEEDS = st.integers(0, 2**31)
VOCABULARY = 32


@st.composite
def forests_by_parent(draw: st.DrawFn) -> list[int]:
    """Draws the parent of each row in depth-first order: any row on the previous row's path, or -1 for a root."""
    parents = [-1]
    for _ in range(draw(st.integers(0, 30))):
        path, row = [-1], len(parents) - 1
        while row >= 0:
            path.append(row)
            row = parents[row]
        # Mostly the previous row, to get chains.
        parents.append(len(parents) - 1 if draw(st.integers(0, 2)) else draw(st.sampled_from(path)))
    return parents


def ends_of(parents: list[int]) -> np.ndarray:
    """Returns for each row the first row after its subtree, int32 ``[rows]``."""
    end = np.arange(1, len(parents) + 1, dtype=np.int32)
    for row in range(len(parents)):
        above = row
        while above >= 0:
            end[above] = row + 1
            above = parents[above]
    return end


@settings(max_examples=200, deadline=None)
@given(forests_by_parent())
def test_runs_are_the_chains_of_a_forest(parents: list[int]) -> None:
    runs = chains_of(ends_of(parents))
    assert runs.parents().tolist() == parents
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    assert runs.positions().tolist() == depths
    first = [row for row, parent in enumerate(parents) if parent != row - 1 or row == 0 or parents.count(parent) > 1]
    assert runs.start.tolist() == first
    assert runs.stop.tolist() == [*first[1:], len(parents)]
    of_rows = runs.of_rows(np.arange(len(parents)))
    assert [int(runs.start[run]) for run in of_rows] == [
        max(start for start in first if start <= r) for r in range(len(parents))
    ]


@settings(max_examples=300, deadline=None)
@given(parents=forests_by_parent(), data=st.data())
def test_subtrees_that_do_not_nest_are_refused_and_no_others(parents: list[int], data: st.DataObject) -> None:
    end = ends_of(parents)
    row = data.draw(st.integers(0, len(end) - 1))
    end[row] = data.draw(st.integers(0, len(end) + 2))
    nests = all(start < end[start] <= len(end) for start in range(len(end))) and all(
        end[inner] <= end[outer] for outer in range(len(end)) for inner in range(outer, min(end[outer], len(end)))
    )
    if nests:
        chains_of(end)
        return
    with pytest.raises(ValueError, match=r"end\[\d+\]=-?\d+ does not nest"):
        chains_of(end)


def tokens_of(tree: TokenTree) -> list[tuple[int, int]]:
    """Returns the unique (episode, sampled row) pairs, by the definition."""
    return [
        (place, row)
        for place, episode in enumerate(tree.episodes)
        for row in sorted({int(row) for leaf in episode.leaves for row in path_of(tree, leaf)})
        if tree.versions[row] >= 0
    ]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, roots=st.integers(1, 3))
def test_tokens_are_pairs_of_an_episode_and_a_sampled_row(seed: int, roots: int) -> None:
    tree = random_tree(np.random.default_rng(seed), roots=roots)
    pairs = tokens_of(tree)
    assert list(zip(*(column.tolist() for column in tree.tokens), strict=True)) == pairs
    assert tree.lengths.tolist() == [sum(own == place for own, _ in pairs) for place in range(len(tree.episodes))]
    assert tree.sampled.tolist() == [row for row in range(tree.rows) if tree.versions[row] >= 0]
    assert tree.trained_episodes().tolist() == [
        any(tree.loss_mask[row] for own, row in pairs if own == place) for place in range(len(tree.episodes))
    ]
    parents = {int(path_of(tree, row)[-2]) for row in range(tree.rows) if len(path_of(tree, row)) > 1}
    assert tree.computed_rows == len(parents)
    values, advantages = tree.of_tokens("values"), tree.of_tokens("advantages")
    assert values is not None and advantages is not None and tree.of_tokens("no_such_extra") is None
    assert values.tolist() == [float(tree.extras["values"][row]) for _, row in pairs]
    assert advantages is tree.extras["advantages"]  # one entry per token of an episode, not per row


def test_rows_that_episodes_share_and_several_segments_are_among_the_trees_of_these_tests() -> None:
    trees = [random_tree(np.random.default_rng(seed)) for seed in range(20)]
    assert any(len(tree.tokens[1]) > len(tree.sampled) for tree in trees)
    assert any(len(episode.leaves) > 1 for tree in trees for episode in tree.episodes)
    assert any(int(tree.runs.positions().max()) > 12 for tree in trees)


def whole_tree(random: np.random.Generator, *, roots: int = 1, experts: int = 8) -> TokenTree:
    """Draws a random tree with every optional part."""
    tree = random_tree(random, roots=roots, vocabulary=VOCABULARY)
    mask = random.random((tree.rows, VOCABULARY)) < 0.3
    mask[np.arange(tree.rows), tree.token_ids] = True
    runs = tree.runs
    media = []
    for run in range(len(runs.start)):
        first, behind = int(runs.start[run]), int(runs.stop[run])
        sampled = np.flatnonzero(tree.versions[first:behind] >= 0)
        behind = first + int(sampled[0]) if len(sampled) else behind
        if first < behind:
            ids = tree.token_ids[first:behind].astype("<i4").tobytes()
            item = msgspec.structs.replace(image_item(1, 1, seed=run), token_ids=ids)
            media.append(Media(item, first, behind))
    names = ("old_logprobs", "reference_logprobs", "teacher_logprobs")
    tree = dataclasses.replace(tree, kept=KeptTokens.of_mask(mask), media=media)
    extras = {name: extra for name, extra in tree.extras.items() if name != "on_policy"}
    return dataclasses.replace(tree, extras=extras).with_extras(
        **{name: random.random(tree.rows).astype(np.float32) for name in names},
        teacher_top_ids=random.integers(0, VOCABULARY, (tree.rows, 3)).astype(np.int32),
        teacher_top_logprobs=-random.random((tree.rows, 3)).astype(np.float32),
        routed_experts=random.integers(0, experts, (tree.rows, 2, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, roots=st.integers(1, 3), data=st.data())
def test_a_part_of_the_episodes_has_the_rows_of_their_paths_and_all_that_belongs_to_them(
    seed: int, roots: int, data: st.DataObject
) -> None:
    tree = whole_tree(np.random.default_rng(seed), roots=roots)
    count = len(tree.episodes)
    places = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    part = tree.take(places)
    check_tree(part)
    assert not part.counts_group and part.group_uid == tree.group_uid
    rows = sorted({int(row) for place in places for leaf in tree.episodes[place].leaves for row in path_of(tree, leaf)})
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(part, name), getattr(tree, name)[rows]) and part.end.dtype == np.int32
    new = {row: place for place, row in enumerate(rows)}
    for row in rows:
        assert path_of(part, new[row]).tolist() == [new[int(old_row)] for old_row in path_of(tree, row)]
    for mine, place in zip(part.episodes, places, strict=True):
        whole = tree.episodes[place]
        moved = [msgspec.structs.replace(t, start=new[t.start], end=new[t.end - 1] + 1) for t in whole.turns]
        assert mine == msgspec.structs.replace(whole, leaves=[new[leaf] for leaf in whole.leaves], turns=moved)
    assert part.media == [
        msgspec.structs.replace(medium, start=new[medium.start], end=new[medium.end - 1] + 1)
        for medium in tree.media
        if medium.start in new
    ]
    assert part.kept is not None and tree.kept is not None
    assert part.kept.lists() == [tree.kept.lists()[row] for row in rows]
    chosen = [own in places for own, _ in tokens_of(tree)]
    for name, values in tree.extras.items():
        wanted = values[chosen] if name in ("advantages", "returns") else values[rows]
        assert np.array_equal(part.extras[name], wanted), name


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, roots=st.integers(1, 3), experts=st.sampled_from([8, 300]))
def test_columns_give_back_the_tree_and_are_read_where_they_lie(seed: int, roots: int, experts: int) -> None:
    tree = whole_tree(np.random.default_rng(seed), roots=roots, experts=experts)
    columns = c.encode_tree(tree)
    assert set(columns) == {*c.ROLLOUT_COLUMNS, c.KEPT_TOKENS, *tree.extras}
    found = c.decode_tree(Group(group_uid=tree.group_uid, index=0, uids=[], versions=[], columns=columns))
    for name in ("token_ids", "end", "loss_mask", "logprobs", "versions"):
        array = getattr(found, name)
        assert np.array_equal(array, getattr(tree, name)) and array.dtype == getattr(tree, name).dtype
        assert np.shares_memory(array, np.frombuffer(columns[name], np.uint8)) and not array.flags.writeable
    assert (found.episodes, found.media, found.kept) == (tree.episodes, tree.media, tree.kept)
    assert found.extras.keys() == tree.extras.keys()
    for name, values in tree.extras.items():
        assert np.array_equal(found.extras[name].reshape(values.shape), values), name
        assert np.shares_memory(found.extras[name], np.frombuffer(columns[name], np.uint8))


@pytest.mark.parametrize("answers", [1, 16])
def test_the_trunk_is_in_the_columns_once(answers: int) -> None:
    """Per row, token, end, version and log-prob take 4 bytes each, the loss mask 1. An episode takes under 200."""
    prompt, tokens = 4096, 64
    random = np.random.default_rng(0)
    ids = random.integers(0, 150_000, prompt), random.integers(0, 150_000, answers * tokens)
    tree = answers_tree("g00000000", ids[0], [tokens] * answers, ids[1], versions=7)
    columns = c.encode_tree(tree)
    rows = prompt + answers * tokens
    assert c.payload_bytes(columns) - len(columns[c.EPISODES]) == 17 * rows + 1  # the media column takes one byte
    assert len(columns[c.EPISODES]) < 200 * answers


def one_answer_each() -> TokenTree:
    """Returns a tree with the prompt in rows 0 and 1, and answers in rows 2 to 4 and 5 to 6."""
    return answers_tree("g00000003", [7, 8], [3, 2], [1, 2, 3, 4, 5], logprobs=-1.0)


def with_episode(tree: TokenTree, **changes: Any) -> TokenTree:
    """Returns a change that replaces the second episode."""
    return dataclasses.replace(tree, episodes=[tree.episodes[0], msgspec.structs.replace(tree.episodes[1], **changes)])


def at(name: str, row: int, value: float) -> Callable[[TokenTree], TokenTree]:
    def changed(tree: TokenTree) -> TokenTree:
        array = getattr(tree, name).copy()
        array[row] = value
        return dataclasses.replace(tree, **{name: array})

    return changed


def turned(start: int, end: int, reward: float | None = None) -> Callable[[TokenTree], TokenTree]:
    return lambda tree: with_episode(tree, turns=[Turn(start, end, "engine-0", [(0, end - start)], "stop", reward)])


WRONG: dict[str, tuple[Callable[[TokenTree], TokenTree], str]] = {
    "a subtree ends behind its parent's": (at("end", 3, 7), r"end\[3\]=7 does not nest"),
    "a subtree ends in front of itself": (at("end", 6, 6), r"end\[6\]=6 does not nest"),
    "a subtree ends behind the last row": (at("end", 0, 8), r"end\[0\]=8 does not nest"),
    "a trained row that nothing sampled": (
        at("loss_mask", 1, True),
        "row 1 is in the loss mask, but no weight version",
    ),
    "a log-prob that is no number": (at("logprobs", 4, np.nan), "row 4: its log-prob is nan"),
    "an endless log-prob": (at("logprobs", 5, -np.inf), "row 5: its log-prob is -inf"),
    "a sampled root": (at("versions", 0, 3), "a sampled row has no row before it"),
    "an array of another length": (
        lambda tree: dataclasses.replace(tree, logprobs=tree.logprobs[1:]),
        r"logprobs has shape \[6\], token_ids \[7\]",
    ),
    "no episode": (lambda tree: dataclasses.replace(tree, episodes=[]), "no rows, or no episode"),
    "a leaf of another group": (
        lambda tree: with_episode(tree, leaves=[7]),
        r"episode g00000003\.1 names row .*7.*, but its group has 7 rows",
    ),
    "a leaf in front of the group": (
        lambda tree: with_episode(tree, leaves=[-1]),
        r"episode g00000003\.1 names row \[-1, .*\], but its group has 7 rows",
    ),
    "a turn of another group": (turned(6, 9), r"episode g00000003\.1 names row .*8.*, but its group has 7 rows"),
    "a turn of the prompt's rows": (turned(1, 7), r"episode g00000003\.1 has a turn with rows that nothing sampled"),
    "a turn without rows": (turned(5, 5), r"episode g00000003\.1 has a turn without a token"),
    "a turn with an endless reward": (
        turned(5, 7, np.inf),
        r"episode g00000003\.1 has a turn with a reward that is not",
    ),
    "a turn of another episode": (
        turned(2, 5),
        r"episode g00000003\.1 has a turn of rows 2 to 5, which are on no path to its leaves",
    ),
    "a turn over two branches": (turned(3, 7), r"episode g00000003\.1 has a turn of rows 3 to 7, which are on no path"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_tree_that_does_not_hold_together_is_refused_with_its_group(name: str) -> None:
    change, words = WRONG[name]
    check_tree(one_answer_each())
    wrong = change(one_answer_each())
    with pytest.raises(ValueError, match=f"^group g00000003: {words}"):
        check_tree(wrong)
    with pytest.raises(ValueError, match=f"^group g00000003: {words}"):
        c.encode_tree(wrong)


def test_log_probs_of_rows_that_nothing_sampled_say_nothing() -> None:
    check_tree(at("logprobs", 0, np.nan)(one_answer_each()))


def test_an_answer_without_a_token_is_refused() -> None:
    """Otherwise the answer would get the tokens of the previous branch."""
    with pytest.raises(ValueError, match=r"group g0: episode g0\.1 has a turn without a token"):
        check_tree(answers_tree("g0", [7, 8], [3, 0], [1, 2, 3]))


def test_whoever_has_the_same_rows_computes_nothing_twice() -> None:
    tree = random_tree(np.random.default_rng(1))
    tokens = tree.tokens
    assert tree.with_extras(more=np.zeros(tree.rows)).tokens is tokens
    assert tree.with_loss_mask(tree.versions >= 1).tokens is tokens
    fewer = with_tokens(tree, versions=np.full(len(tokens[1]), -1))
    assert len(fewer.tokens[1]) == 0


def test_an_episode_may_end_where_another_goes_on() -> None:
    """The leaf of a shorter episode is on the path of a longer episode. Alone, the shorter episode ends at its leaf."""
    tree = answers_tree("g0", [7, 8], [4], [1, 2, 3, 4], logprobs=[-1.0, -2.0, -3.0, -4.0])
    short = Episode("g0.1", [3], 0.5, {}, [Turn(2, 4, "engine-0", [(0, 2)], "stop")], "stop")
    both = dataclasses.replace(tree, episodes=[*tree.episodes, short])
    check_tree(both)
    assert both.tokens[1].tolist() == [2, 3, 4, 5, 2, 3]
    alone = both.take([1])
    check_tree(alone)
    assert alone.end.tolist() == [4] * 4 and alone.episodes[0].leaves == [3] and alone.computed_rows == 3

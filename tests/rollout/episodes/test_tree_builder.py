"""Compares the token tree of a group's episodes with a plain tree of single rows that is built by the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.columns import ROUTED_EXPERTS
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import TokenTree, check_tree
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn
from relax_core.rollout.episodes.group_assembly import TreeBuilder, build_tree
from tests.media_items import image_item
from tests.responses import response


def turn(
    prompt: Sequence[int], sampled: Sequence[int], *, version: int = 0, media: Sequence[Media] = (), **given: object
) -> PlayedTurn:
    answer = response(sampled, versions=version, **given)  # type: ignore[arg-type]
    return PlayedTurn(prompt_ids=prompt, response=answer, media=media)


def episode(uid: str, *turns: PlayedTurn, reward: float = 0.0) -> EpisodeRecord:
    return EpisodeRecord(uid=uid, turns=list(turns), output=RewardOutput(reward=reward), ended="env_done")


@dataclass(eq=False)
class Row:
    """One row of the plain tree. ``draw`` is the response that sampled it, or None for prompts and observations."""

    token: int
    parent: Row | None
    draw: int | None = None
    version: int = -1
    logprob: float = 0.0
    experts: tuple[int, ...] | None = None
    children: list[Row] = field(default_factory=list)
    place: int = -1
    end: int = -1

    def child(self, row: Row) -> Row:
        row.parent = self
        self.children.append(row)
        return row

    def path(self) -> list[Row]:
        return [] if self.parent is None else [*self.parent.path(), self]


def lay_out(row: Row, rows: list[Row]) -> None:
    for child in row.children:
        child.place = len(rows)
        rows.append(child)
        lay_out(child, rows)
        child.end = len(rows)


def told(experts: np.ndarray | None, place: int) -> tuple[int, ...] | None:
    return None if experts is None or place >= len(experts) else tuple(experts[place].ravel().tolist())


def agree(row: Row, token: int, experts: tuple[int, ...] | None) -> bool:
    return row.token == token and (None in (row.experts, experts) or row.experts == experts)


def plain_tree(episodes: Sequence[EpisodeRecord]) -> tuple[list[Row], list[list[Row]]]:
    """Returns all rows in depth-first order, and the last row of each turn of each episode."""
    root, ends = Row(0, None), list[list[Row]]()
    for played_episode in episodes:
        at, own = root, list[Row]()
        for draw, its in enumerate(played_episode.turns):
            so_far, at, generated = at.path(), root, its.response
            on_own_path = True
            for place, token in enumerate(its.prompt_ids):
                experts = told(generated.prompt_experts, place)
                if on_own_path and place < len(so_far) and agree(so_far[place], token, experts):
                    at = so_far[place]
                    at.experts = at.experts or experts
                    continue
                on_own_path = False
                same = [row for row in at.children if row.draw is None and agree(row, token, experts)]
                at = same[0] if same else at.child(Row(token, at, experts=experts))
            for place, token in enumerate(generated.output_ids.tolist()):
                new = Row(token, at, draw, int(generated.versions[place]), float(generated.logprobs[place]))
                new.experts = told(generated.response_experts, place)
                at = at.child(new)
            own.append(at)
        ends.append(own)
    rows: list[Row] = []
    lay_out(root, rows)
    return rows, ends


def check_against_rows(tree: TokenTree, episodes: Sequence[EpisodeRecord]) -> None:
    check_tree(tree)
    rows, ends = plain_tree(episodes)
    assert tree.token_ids.tolist() == [row.token for row in rows]
    assert tree.end.tolist() == [row.end for row in rows]
    assert tree.versions.tolist() == [row.version for row in rows]
    assert tree.logprobs.tolist() == [row.logprob for row in rows]
    assert tree.loss_mask.tolist() == [row.version >= 0 for row in rows]
    for built, its, own in zip(tree.episodes, episodes, ends, strict=True):
        assert [had.end - 1 for had in built.turns] == [row.place for row in own]
        assert [had.end - had.start for had in built.turns] == [len(had.response.output_ids) for had in its.turns]
        for had, played in zip(built.turns, its.turns, strict=True):  # the rows of a response are adjacent
            assert tree.token_ids[had.start : had.end].tolist() == played.response.output_ids.tolist()
        leaves = [row for row in own if not any(row in later.path()[:-1] for later in own)]
        assert built.leaves == [row.place for row in leaves]
    if tree.extras:
        for row, experts in zip(rows, tree.extras[ROUTED_EXPERTS], strict=True):
            assert tuple(experts.ravel().tolist()) == (row.experts or (0,))


def test_turns_grow_a_branch_and_equal_draws_are_not_shared() -> None:
    first = episode("g.0", turn([1, 2], [7, 3]), turn([1, 2, 7, 3, 4], [8, 3]))
    second = episode("g.1", turn([1, 2], [7, 3]), turn([1, 2, 7, 3, 4], [9, 3]))
    tree = build_tree("g", [first, second])
    assert tree.token_ids.tolist() == [1, 2, 7, 3, 4, 8, 3, 7, 3, 4, 9, 3]
    assert tree.end.tolist() == [12, 12, 7, 7, 7, 7, 7, 12, 12, 12, 12, 12]
    assert [built.leaves for built in tree.episodes] == [[6], [11]]
    assert [(had.start, had.end) for had in tree.episodes[1].turns] == [(7, 9), (10, 12)]
    assert tree.lengths.tolist() == [4, 4]
    check_against_rows(tree, [first, second])


def test_a_history_without_its_middle_starts_a_new_path_from_the_last_row_that_both_have() -> None:
    episode_of_three = episode("g.0", turn([1, 2], [7, 3]), turn([1, 2, 7, 3, 4], [8, 3]), turn([1, 2, 7, 5], [6, 3]))
    tree = build_tree("g", [episode_of_three])
    # The fork is inside the first response. The tokens before the fork are sampled only once.
    assert tree.token_ids.tolist() == [1, 2, 7, 3, 4, 8, 3, 5, 6, 3]
    assert tree.end.tolist() == [10, 10, 10, 7, 7, 7, 7, 10, 10, 10]
    assert tree.episodes[0].leaves == [6, 9]
    assert tree.lengths.tolist() == [6]
    check_against_rows(tree, [episode_of_three])


def test_different_openings_are_a_forest() -> None:
    tree = build_tree("g", [episode("g.0", turn([1], [7])), episode("g.1", turn([2], [7]))])
    assert tree.token_ids.tolist() == [1, 7, 2, 7] and tree.end.tolist() == [2, 2, 4, 4]


def test_rows_are_shared_only_where_the_recorded_experts_agree() -> None:
    def routed(prompt: Sequence[int], *experts: int) -> PlayedTurn:
        own = np.array([[[expert]] for expert in experts], dtype=np.uint8)
        return turn(prompt, [7, 3], prompt_experts=own[: len(prompt)], response_experts=own[len(prompt) :])

    same = build_tree("g", [episode("g.0", routed([1, 2], 4, 5, 6)), episode("g.1", routed([1, 2], 4, 5, 8))])
    assert same.token_ids.tolist() == [1, 2, 7, 3, 7, 3]
    assert same.extras[ROUTED_EXPERTS].ravel().tolist() == [4, 5, 6, 0, 8, 0]
    other_episodes = [episode("g.0", routed([1, 2], 4, 5, 6)), episode("g.1", routed([1, 2], 4, 9, 8))]
    assert build_tree("g", other_episodes).token_ids.tolist() == [1, 2, 7, 3, 2, 7, 3]
    # A later turn reports the routing of the previous turn's last token. A different routing starts a new path.
    later = routed([1, 2, 7, 3, 5], 4, 5, 6, 9, 1, 2)
    assert build_tree("g", [episode("g.0", routed([1, 2], 4, 5, 6), later)]).extras[
        ROUTED_EXPERTS
    ].ravel().tolist() == [*(4, 5, 6, 9, 1, 2, 0)]
    anew = build_tree("g", [episode("g.0", routed([1, 2], 4, 5, 0), later)])
    assert anew.token_ids.tolist() == [1, 2, 7, 3, 7, 3, 5, 7, 3]
    assert anew.versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, 0, 0] and anew.episodes[0].leaves == [3, 8]


def test_kept_sets_go_by_row() -> None:
    def kept(*sets: list[int]) -> KeptTokens:
        return KeptTokens.of_lists(sets, vocab_size=10)

    kept_episode = episode(
        "g.0", turn([1, 2], [7, 3], kept=kept([7, 8], [3])), turn([1, 2, 7, 3, 4], [8], kept=kept([8, 9, 1]))
    )
    tree = build_tree("g", [kept_episode])
    assert tree.kept is not None and tree.kept.tokens == tree.rows
    sets = tree.kept.lists()
    assert [sets[2], sets[3], sets[5]] == [[7, 8], [3], [1, 8, 9]]
    assert all(sets[row] == list(range(10)) for row in (0, 1, 4))
    wrong = episode("g.0", turn([1], [7], kept=kept([8])))
    with pytest.raises(ValueError, match="is not in the set that it was sampled from"):
        build_tree("g", [wrong])


def test_a_position_does_not_change_when_its_run_is_split() -> None:
    builder = TreeBuilder()
    long = builder.observe(builder.root, [1, 2, 3, 4])
    short = builder.observe(builder.root, [1, 2])
    assert builder.observe(builder.root, [1, 2, 3, 4]) is long and builder.observe(builder.root, [1, 2]) is short
    builder.sample(short, response([9], versions=0))
    assert [chain.token_ids.tolist() for chain in builder.chains()] == [[1, 2], [3, 4], [9]]


@st.composite
def groups(draw: st.DrawFn, *, routed: bool) -> list[EpisodeRecord]:
    """Returns episodes with prompts, answers and observations that often match. Some histories are rewritten."""
    token = st.integers(1, 2)
    texts = st.lists(token, min_size=1, max_size=3)

    def experts(count: int) -> np.ndarray:
        return np.array(draw(st.lists(token, min_size=count, max_size=count)), dtype=np.uint8).reshape(count, 1, 1)

    group = []
    for place in range(draw(st.integers(1, 3))):
        history, turns = draw(texts), list[PlayedTurn]()
        for number in range(draw(st.integers(1, 4))):
            sampled = draw(texts)
            more = {}
            if routed:
                more = {"prompt_experts": experts(len(history)), "response_experts": experts(len(sampled) - 1)}
            logprobs = [-(place * 10.0 + number) - k / 4 for k in range(len(sampled))]
            turns.append(turn(history, sampled, version=number, logprobs=logprobs, **more))
            kept = draw(st.integers(0, len(history))) if draw(st.booleans()) else len(history) + len(sampled)
            history = [*(history + sampled)[:kept], *draw(texts)]
        group.append(episode(f"g.{place}", *turns))
    return group


@given(groups(routed=False))
def test_any_group_equals_the_tree_of_rows(group: list[EpisodeRecord]) -> None:
    check_against_rows(build_tree("g", group), group)


@given(groups(routed=True))
def test_any_group_with_recorded_experts_equals_the_tree_of_rows(group: list[EpisodeRecord]) -> None:
    check_against_rows(build_tree("g", group), group)


def test_rows_of_another_picture_with_equal_ids_are_not_shared() -> None:
    """Two images of equal size have the same token ids. Episodes share the rows before such images, and share equal
    images completely.
    """
    item, other_item = image_item(1, 3, seed=1), image_item(1, 3, seed=2)
    ids = item.ids.tolist()
    assert ids == other_item.ids.tolist() and item.digest != other_item.digest
    prompt = [5, 6, *ids, 7]
    tree = build_tree(
        "g00000000",
        [
            episode("g00000000.0", turn(prompt, [1], media=[Media(item, 2, 5)])),
            episode("g00000000.1", turn(prompt, [2], media=[Media(item, 2, 5)])),
            episode("g00000000.2", turn(prompt, [3], media=[Media(other_item, 2, 5)])),
        ],
    )
    check_tree(tree)
    # 5 6 | picture one 7 | 1 | 2 | picture other 7 | 3
    assert tree.token_ids.tolist() == [5, 6, *ids, 7, 1, 2, *ids, 7, 3]
    assert list(tree.media) == [Media(item, 2, 5), Media(other_item, 8, 11)]
    assert tree.end.tolist() == [13, 13, 8, 8, 8, 8, 7, 8, 13, 13, 13, 13, 13]


def test_a_picture_of_a_later_turn_and_one_that_ends_elsewhere_keep_their_rows() -> None:
    """The second episode has text in place of a part of the first episode's image: only some of its rows match."""
    item = image_item(2, 2)
    ids = item.ids.tolist()
    first = turn([5], [1, 2])
    tree = build_tree(
        "g00000000",
        [
            episode("g00000000.0", first, turn([5, 1, 2, 6, *ids, 7], [3], media=[Media(item, 4, 8)])),
            episode("g00000000.1", turn([5, 1], [4]), turn([5, 1, 4, 6, *ids[:2], 9], [3])),
        ],
    )
    check_tree(tree)
    (placed,) = tree.media
    assert tree.token_ids[placed.start : placed.end].tolist() == ids and placed.item == item
    path = tree.token_ids[tree.path(tree.episodes[0].leaves[0])].tolist()
    assert path == [5, 1, 2, 6, *ids, 7, 3]
    assert tree.token_ids[tree.path(tree.episodes[1].leaves[-1])].tolist() == [5, 1, 4, 6, *ids[:2], 9, 3]

"""The datum: a group is a token tree, from the rollout to the gradient.

Rows are tokens, in depth-first order, each there once whatever shares it: the prompt is a trunk, answers are branches,
a turn grows a branch, a rewritten history forks one. ``end[k]`` is the row behind the subtree of row k, so that row q
sees row k iff ``k <= q < end[k]``. A group may be a forest. The last token of a branch is a row too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens

TRUNCATED = (
    "truncated"  # the ledger's reason for an episode of which nothing is trained because it was cut at its limit
)
NOT_SAMPLED = -1  # the version of a row that no weights sampled

# Extras that belong to an episode's token and not to a row: two episodes that share a sampled row have one each.
BY_TOKEN = frozenset({"advantages", "returns", "on_policy"})
_FOUND = {"runs", "sampled", "computed", "tokens", "lengths"}  # what a tree computes once


class Turn(msgspec.Struct, frozen=True):
    """One response: it sampled the rows ``start`` to ``end`` (exclusive), which are neighbours. ``versions``: (weight
    version, tokens) in their order, for the books; the tree's ``versions`` say it for each row. ``finish``: how the
    engine ended it. ``reward``: of this turn alone, where the environment gives one. Times are Unix seconds, 0 where
    they are not known."""

    start: int
    end: int
    engine: str
    versions: list[tuple[int, int]]
    finish: str
    reward: float | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


class Episode(msgspec.Struct, frozen=True):
    """One run of model and environment: one uid, one reward, one fate in the ledger.

    ``leaves``: the last row of each of its segments. ``reward`` is None where it could not be computed; such an episode
    is dropped, never trained as 0. ``ended``: why it ended, for a single turn the response's own end.
    """

    uid: str
    leaves: list[int]
    reward: float | None
    parts: dict[str, float]
    turns: list[Turn]
    ended: str


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A picture, a sound or a video that the rows ``start`` to ``end`` (exclusive) stand for. ``reference`` says where
    its bytes are; they do not travel with the tree."""

    kind: str
    reference: str
    start: int
    end: int


class Runs(NamedTuple):
    """The chains of a tree, int64 ``[runs]`` each: rows ``start`` to ``stop`` (exclusive), each the only child of the
    one before. ``end``: the row behind the subtree. ``parent``: the run whose last row the first row hangs on, -1 at a
    root. ``depth``: the first row's place in its own path."""

    start: np.ndarray
    stop: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The run of each row, int64."""
        return np.searchsorted(self.start, rows, side="right") - 1

    def positions(self) -> np.ndarray:
        """The place of each row in its own path, int64 ``[rows]``."""
        sizes = self.stop - self.start
        return np.arange(int(sizes.sum())) + np.repeat(self.depth - self.start, sizes)

    def parents(self) -> np.ndarray:
        """The row that each row hangs on, int64 ``[rows]``; -1 at a root."""
        rows = np.arange(-1, int(self.stop[-1]) - 1)
        rows[self.start] = np.where(self.parent < 0, -1, self.stop[self.parent] - 1)
        return rows


def together(forests: Sequence[Runs]) -> Runs:
    """The chains of forests whose rows stand one after the other."""
    if len(forests) == 1:
        return forests[0]
    rows = np.cumsum([0, *(runs.stop[-1] for runs in forests[:-1])])
    before = np.cumsum([0, *(len(runs.start) for runs in forests[:-1])])
    each = [len(runs.start) for runs in forests]
    start, stop, end, parent, depth = (np.concatenate(column) for column in zip(*forests, strict=True))
    shift = np.repeat(rows, each)
    parent = np.where(parent < 0, -1, parent + np.repeat(before, each))
    return Runs(start + shift, stop + shift, end + shift, parent, depth)


def runs_of(end: np.ndarray) -> Runs:
    """The chains of a forest ``end`` ``[rows]``, one row or more. Raises ValueError where the subtrees do not nest."""
    rows = len(end)
    starts = np.flatnonzero(np.concatenate(([True], end[1:] != end[:-1])))
    stops = np.append(starts[1:], rows)
    start, stop, last = starts.tolist(), stops.tolist(), end[starts].tolist()
    parent, depth, above = list[int](), list[int](), list[int]()
    for run, (first, behind, subtree) in enumerate(zip(start, stop, last, strict=True)):
        while above and last[above[-1]] <= first:
            above.pop()
        its = above[-1] if above else -1
        if not behind <= subtree <= (rows if its < 0 else last[its]):
            raise ValueError(f"end[{first}]={subtree} does not nest: a subtree ends inside of the one that it is in")
        parent.append(its)
        depth.append(0 if its < 0 else depth[its] + stop[its] - start[its])
        above.append(run)
    return Runs(starts, stops, np.asarray(last), np.asarray(parent), np.asarray(depth))


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """All that a prompt led to. Arrays are flat over the rows, ``[rows]``, and read-only by agreement.

    ``loss_mask``: rows that are trained; each of them was sampled. ``logprobs``: of a sampled row's token given its
    path, natural logs of the distribution that it was sampled from. ``versions``: of the weights that sampled it, -1
    where nothing was sampled. ``kept``: the set that each row's token was sampled from, where top_k, top_p or min_p
    leaves tokens out.

    ``extras``: by name what roles add, one entry a row (``[rows]`` or ``[rows, …]``) but for `BY_TOKEN`, which have one
    a token. The **tokens** of a tree are its (episode, sampled row) pairs, episode by episode, rows ascending: what the
    algorithms see. ``counts_group``: of a group that was cut into several trees one alone counts as the group.
    """

    group_uid: str
    token_ids: np.ndarray  # int32
    end: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    episodes: Sequence[Episode]
    media: Sequence[Media] = ()
    kept: KeptTokens | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    counts_group: bool = True

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @cached_property
    def runs(self) -> Runs:
        return runs_of(self.end)

    @cached_property
    def sampled(self) -> np.ndarray:
        """The sampled rows, int64, ascending."""
        return np.flatnonzero(self.versions >= 0)

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each token its episode's place and its row, int64 ``[tokens]`` each."""
        whole = self._one_branch_an_episode()
        if whole is not None:
            return whole
        return rows_of_episodes(self.runs, [one.leaves for one in self.episodes], self.versions >= 0)

    def _one_branch_an_episode(self) -> tuple[np.ndarray, np.ndarray] | None:
        """`tokens` where every sampled row is in the last run of one episode's only segment: groups of one turn, for
        which the general way takes three times as long. None for other trees."""
        runs, sampled = self.runs, self.sampled
        leaves = np.array([one.leaves[0] for one in self.episodes])
        run = np.searchsorted(runs.stop, leaves, side="right")
        first, behind = np.searchsorted(sampled, (runs.start[run], runs.stop[run]))
        counts = behind - first
        alone = (leaves == runs.stop[run] - 1).all() and (run[1:] > run[:-1]).all()
        if not alone or counts.sum() != len(sampled) or any(len(one.leaves) > 1 for one in self.episodes):
            return None
        return np.repeat(np.arange(len(counts)), counts), sampled

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each episode, int64 ``[episodes]``."""
        return np.bincount(self.tokens[0], minlength=len(self.episodes))

    @cached_property
    def computed(self) -> np.ndarray:
        """Which rows the trainer computes, bool ``[rows]``: all but the last of each branch, which predict nothing."""
        return self.end > np.arange(1, self.rows + 1)

    @property
    def computed_rows(self) -> int:
        return int(np.count_nonzero(self.computed))

    def path(self, row: int) -> np.ndarray:
        """The rows that ``row`` sees, itself the last, int64."""
        return np.flatnonzero(self.end[: row + 1] > row)

    def of_tokens(self, name: str) -> np.ndarray | None:
        """An extra by token, ``[tokens]`` or ``[tokens, …]``; None where no role wrote it."""
        extra = self.extras.get(name)
        return extra if extra is None or name in BY_TOKEN else extra[self.tokens[1]]

    def trained_episodes(self) -> np.ndarray:
        """Which episodes have a trained token, bool ``[episodes]``."""
        episodes, rows = self.tokens
        trained = self.loss_mask[rows]
        return self.lengths > 0 if trained.all() else np.bincount(episodes[trained], minlength=len(self.episodes)) > 0

    def oldest_versions(self, *, trained: bool) -> np.ndarray:
        """The oldest version among each episode's tokens, int64 ``[episodes]``. ``trained``: among its trained tokens,
        from which staleness is counted (DESIGN §5); an episode without one has the version of its newest token."""
        episodes, rows = self.tokens
        versions = self.versions[rows].astype(np.int64)
        oldest = np.full(len(self.episodes), np.iinfo(np.int64).max)
        chosen = self.loss_mask[rows]
        if not trained or chosen.all():
            if self.lengths.all():
                return np.minimum.reduceat(versions, np.cumsum(self.lengths) - self.lengths)
            np.minimum.at(oldest, episodes, versions)
            return oldest
        np.minimum.at(oldest, episodes[chosen], versions[chosen])
        newest = np.full(len(self.episodes), NOT_SAMPLED)
        np.maximum.at(newest, episodes, versions)
        return np.where(self.trained_episodes(), oldest, newest)

    def rows_of(self, places: Sequence[int]) -> np.ndarray:
        """The rows on the paths of the episodes at ``places``, one or more, int64, ascending."""
        leaves = [leaf for place in places for leaf in self.episodes[place].leaves]
        return rows_of_episodes(self.runs, [leaves], np.ones(self.rows, dtype=bool))[1]

    def with_extras(self, **extras: np.ndarray) -> TokenTree:
        """The same rows with these extras beside what there is."""
        return self._same_rows(replace(self, extras={**self.extras, **extras}))

    def with_loss_mask(self, loss_mask: np.ndarray) -> TokenTree:
        """The same rows, of which others are trained."""
        return self._same_rows(replace(self, loss_mask=loss_mask))

    def _same_rows(self, other: TokenTree) -> TokenTree:
        other.__dict__.update({name: self.__dict__[name] for name in _FOUND & self.__dict__.keys()})
        return other

    def take(self, places: Sequence[int]) -> TokenTree:
        """The tree of the episodes at ``places`` alone, ascending: the rows of their paths. It counts as no group."""
        rows = self.rows_of(places)
        kept = np.zeros(self.rows, dtype=bool)
        kept[rows] = True
        before = np.concatenate(([0], np.cumsum(kept)))  # kept rows in front of each row
        of_tokens = np.isin(self.tokens[0], places)
        return replace(
            self,
            token_ids=self.token_ids[rows],
            end=before[self.end[rows]].astype(np.int32),
            loss_mask=self.loss_mask[rows],
            logprobs=self.logprobs[rows],
            versions=self.versions[rows],
            episodes=[_moved(self.episodes[place], before) for place in places],
            media=[_media(one, before) for one in self.media if kept[one.start]],
            kept=None if self.kept is None else self.kept.take(rows),
            extras={name: one[of_tokens if name in BY_TOKEN else rows] for name, one in self.extras.items()},
            counts_group=False,
        )


def rows_of_episodes(runs: Runs, leaves: Sequence[Sequence[int]], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ``wanted`` (bool ``[rows]``) rows on the paths of each episode: the episodes' places, and the rows, int64,
    episode by episode, rows ascending, each once an episode. ``leaves``: of each episode, one row or more."""
    several = any(len(own) > 1 for own in leaves)
    row = np.array([leaf for own in leaves for leaf in own], dtype=np.int64)
    episode = np.repeat(np.arange(len(leaves)), [len(own) for own in leaves])
    some = np.add.reduceat(wanted, runs.start, dtype=np.int64) > 0
    run, stop = runs.of_rows(row), row + 1
    pieces = []
    while len(run):
        here = some[run]
        pieces.append(np.stack([episode[here], runs.start[run[here]], stop[here]]))
        parent = runs.parent[run]
        inner = parent >= 0
        episode, run = episode[inner], parent[inner]
        stop = runs.stop[run]
    places, first, behind = np.concatenate(pieces, axis=1)
    order = np.lexsort((first, places))
    places, first, sizes = places[order], first[order], (behind - first)[order]
    rows = np.arange(int(sizes.sum())) + np.repeat(first - np.cumsum(sizes) + sizes, sizes)
    of_rows = np.repeat(places, sizes)
    if several:
        both = np.unique(of_rows * len(wanted) + rows)
        of_rows, rows = np.divmod(both, len(wanted))
    chosen = wanted[rows]
    return (of_rows, rows) if chosen.all() else (of_rows[chosen], rows[chosen])


def check_tree(tree: TokenTree) -> None:
    """Raises ValueError, with the group's uid and what to mend, for a tree that does not hold together."""

    def wrong(text: str) -> ValueError:
        return ValueError(f"group {tree.group_uid}: {text}")

    arrays = {"end": tree.end, "loss_mask": tree.loss_mask, "logprobs": tree.logprobs, "versions": tree.versions}
    for name, array in arrays.items():
        if array.shape != tree.token_ids.shape:
            raise wrong(f"{name} has shape {list(array.shape)}, token_ids {list(tree.token_ids.shape)}: one a row")
    if not tree.rows or not tree.episodes:
        raise wrong("no rows, or no episode: a group without answers is dropped, not put")
    try:
        runs = tree.runs
    except ValueError as error:
        raise wrong(str(error)) from None
    sampled = tree.versions >= 0
    if (tree.loss_mask & ~sampled).any():
        row = int(np.argmax(tree.loss_mask & ~sampled))
        raise wrong(f"row {row} is in the loss mask, but no weight version sampled it: only sampled rows are trained")
    if not np.isfinite(tree.logprobs[sampled]).all():
        row = int(tree.sampled[np.argmin(np.isfinite(tree.logprobs[sampled]))])
        raise wrong(f"row {row}: its log-prob is {tree.logprobs[row]}. Does the engine give finite log-probs?")
    if sampled[runs.start[runs.parent < 0]].any():
        raise wrong("a sampled row has nothing in front of it: a tree begins with its prompt")
    for one in tree.episodes:
        if any(turn.start >= turn.end for turn in one.turns):
            raise wrong(f"episode {one.uid} has a turn without a token: such an answer is dropped, not put")
        rows = [*one.leaves, *(row for turn in one.turns for row in (turn.start, turn.end - 1))]
        if not one.leaves or min(rows) < 0 or max(rows) >= tree.rows:
            raise wrong(f"episode {one.uid} names row {rows}, but its group has {tree.rows} rows")
    if (fault := _fault_of_turns(tree)) is not None:
        raise wrong(fault)


def _fault_of_turns(tree: TokenTree) -> str | None:
    """Why the turns of a tree, which all name rows of it, cannot be those of their episodes; None where they can."""
    turns = [(one, turn) for one in tree.episodes for turn in one.turns]
    bounds = np.array([(turn.start, turn.end) for _, turn in turns], dtype=np.int64).ravel()
    if not len(bounds):
        return None
    # One row more, so that a turn may end with the last one; what lies between two turns is not looked at.
    oldest = np.minimum.reduceat(np.append(tree.versions, 0), bounds)[::2].tolist()
    reaches = np.minimum.reduceat(np.append(tree.end, 0), bounds)[::2].tolist()
    for (one, turn), version, reach in zip(turns, oldest, reaches, strict=True):
        if version < 0:
            return f"episode {one.uid} has a turn with rows that nothing sampled"
        if not any(turn.end <= leaf + 1 <= reach for leaf in one.leaves):
            return (
                f"episode {one.uid} has a turn of rows {turn.start} to {turn.end}, which are on no path to its leaves"
            )
    return None


def _moved(episode: Episode, before: np.ndarray) -> Episode:
    return msgspec.structs.replace(
        episode,
        leaves=[int(before[leaf]) for leaf in episode.leaves],
        turns=[
            msgspec.structs.replace(turn, start=int(before[turn.start]), end=int(before[turn.end - 1]) + 1)
            for turn in episode.turns
        ],
    )


def _media(one: Media, before: np.ndarray) -> Media:
    return msgspec.structs.replace(one, start=int(before[one.start]), end=int(before[one.end]))


def group_uid(index: int) -> str:
    return f"g{index:08d}"


def sample_uid(group: str, place: int) -> str:
    """The uid of the episode at ``place`` of a group."""
    return f"{group}.{place}"

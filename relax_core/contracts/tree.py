"""Defines the token tree, which stores a group's episodes from the rollout to the gradient.

A row is one token; rows are in depth-first order. A token that several episodes share is stored once. The prompt is the
trunk, and responses are branches. A further turn extends a branch, and a rewritten history forks the branch. ``end[k]``
is the row after the subtree of row k, so row q attends to row k iff ``k <= q < end[k]``. A group may be a forest. The
last token of a branch also has a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np

from relax_core.contracts.chains import Chains, chains_of, rows_of_episodes
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media

TRUNCATED = "truncated"  # the ledger's reason for an episode that was cut at its token limit and therefore dropped
MISMATCHED = "mismatched"  # the ledger's reason for a data row's untrained sample with another row's response
NOT_SAMPLED = -1  # the version of a row that was not sampled
OF_DATA = "data"  # the engine's name in turns that are in the data; their log-probs are 0

# These extras have one entry per token, not per row: if two episodes share a sampled row, each episode has an entry.
BY_TOKEN = frozenset({"advantages", "returns", "on_policy"})
_CACHED = {"runs", "sampled", "computed", "tokens", "lengths"}  # properties that depend only on the rows

_NOTICEABLE = 2.0**-10  # rounding errors below this share of the rewards' spread are ignored
_ROUNDING = 2.0**-46  # 128 units in the last place of float64, relative to the largest reward


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds one response. Its sampled rows are ``start`` to ``end`` (exclusive).

    ``versions`` lists (weight version, number of tokens) in sampling order, for the ledger; the tree's ``versions`` has
    the version of each row. ``finish`` is the engine's finish reason. ``reward`` is the environment's reward of this
    turn, None for a turn without a reward. Times are in Unix seconds, 0 if unknown. ``state_key`` identifies the state
    at the start of the turn; turns of a group with equal keys begin in equal states. ``tools`` names the tools that the
    response calls. ``env_ms`` is the duration of the environment's calls after the response, in milliseconds.
    """

    start: int
    end: int
    engine: str
    versions: list[tuple[int, int]]
    finish: str
    reward: float | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    state_key: str | None = None
    tools: list[str] = []
    env_ms: float = 0.0


class Episode(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds one episode (sample): all turns of model and environment for a prompt.

    It has one reward and one ledger entry.

    ``leaves`` has the last row of each segment of the episode. A segment is a path from the root to a leaf; a rewritten
    history adds a segment. ``reward`` is None if the reward could not be computed; the episode is then dropped, not
    trained with reward 0. ``ended`` is the reason why the episode ended; for a single-turn episode, the response's
    finish reason. ``why`` is the reward's short explanation, such as a judge's name, verdict and text.
    """

    uid: str
    leaves: list[int]
    reward: float | None
    parts: dict[str, float]
    turns: list[Turn]
    ended: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """Holds all tokens of a group. Arrays are flat over the rows, ``[rows]``, and callers treat them as read-only.

    ``loss_mask`` marks the trained rows; only sampled rows are trained. ``logprobs`` has the natural log-prob of each
    sampled token given its path, under the sampling distribution. ``versions`` has the weight version that sampled the
    row, -1 if the row was not sampled. ``kept`` has the kept set of each row's token, if top_k, top_p or min_p excludes
    tokens.

    ``extras`` maps a name to an array that a role adds, with one entry for each row (``[rows]`` or ``[rows, …]``);
    arrays in `BY_TOKEN` have one entry for each token. The **tokens** of a tree are its (episode, sampled row) pairs,
    episode by episode, rows ascending; the algorithms compute with these tokens. ``counts_group``: if a group is split
    into several trees, this field is True for one of them, so the group is counted once.
    """

    group_uid: str
    token_ids: np.ndarray  # int32
    end: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    logprobs: np.ndarray  # float32
    versions: np.ndarray  # int32
    episodes: Sequence[Episode]
    media: Sequence[Media] = ()  # in order of rows
    kept: KeptTokens | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    counts_group: bool = True

    @property
    def rows(self) -> int:
        """Returns the number of rows."""
        return len(self.token_ids)

    @cached_property
    def runs(self) -> Chains:
        """Returns the chains of the tree."""
        return chains_of(self.end)

    @cached_property
    def sampled(self) -> np.ndarray:
        """Returns the sampled rows, int64, ascending."""
        return np.flatnonzero(self.versions >= 0)

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns two int64 arrays ``[tokens]``: the episode number and the row of each token."""
        whole = self._one_branch_an_episode()
        if whole is not None:
            return whole
        return rows_of_episodes(self.runs, [episode.leaves for episode in self.episodes], self.versions >= 0)

    def _one_branch_an_episode(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns `tokens` if each episode has one segment and all its sampled rows are in the segment's last chain.

        Otherwise returns None. This is a fast path for single-turn groups; the general algorithm takes three times as
        long for them.
        """
        runs, sampled = self.runs, self.sampled
        leaves = np.array([episode.leaves[0] for episode in self.episodes])
        run = np.searchsorted(runs.stop, leaves, side="right")
        first, behind = np.searchsorted(sampled, (runs.start[run], runs.stop[run]))
        counts = behind - first
        alone = (leaves == runs.stop[run] - 1).all() and (run[1:] > run[:-1]).all()
        if not alone or counts.sum() != len(sampled) or any(len(episode.leaves) > 1 for episode in self.episodes):
            return None
        return np.repeat(np.arange(len(counts)), counts), sampled

    @cached_property
    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each episode, int64 ``[episodes]``."""
        return np.bincount(self.tokens[0], minlength=len(self.episodes))

    @property
    def rewards(self) -> np.ndarray:
        """Returns the episodes' rewards as a `reward_array`, ``[episodes]``; every episode must have a reward."""
        return reward_array([math.nan if episode.reward is None else episode.reward for episode in self.episodes])

    @cached_property
    def computed(self) -> np.ndarray:
        """Returns the rows that the trainer computes, bool ``[rows]``: all but the last row of each branch.

        No token follows the last row of a branch, so this row has no prediction.
        """
        return self.end > np.arange(1, self.rows + 1)

    @property
    def computed_rows(self) -> int:
        """Returns the number of rows that the trainer computes."""
        return int(np.count_nonzero(self.computed))

    def path(self, row: int) -> np.ndarray:
        """Returns the rows that ``row`` attends to, int64; the last of them is ``row``."""
        return np.flatnonzero(self.end[: row + 1] > row)

    def of_tokens(self, name: str) -> np.ndarray | None:
        """Returns an extra for each token, ``[tokens]`` or ``[tokens, …]``; None if no role wrote this extra."""
        extra = self.extras.get(name)
        return extra if extra is None or name in BY_TOKEN else extra[self.tokens[1]]

    @property
    def is_of_data(self) -> bool:
        """Returns whether the responses are in the data, so no engine sampled them."""
        return all(turn.engine == OF_DATA for episode in self.episodes for turn in episode.turns)

    def trained_episodes(self) -> np.ndarray:
        """Returns a bool array ``[episodes]``, True for episodes with a trained token."""
        episodes, rows = self.tokens
        trained = self.loss_mask[rows]
        return self.lengths > 0 if trained.all() else np.bincount(episodes[trained], minlength=len(self.episodes)) > 0

    def oldest_versions(self, *, trained: bool) -> np.ndarray:
        """Returns the oldest version among each episode's tokens, int64 ``[episodes]``.

        With ``trained``, only trained tokens count, because they determine the staleness (docs/rollout.md). For an
        episode without a trained token the result is then the version of its newest token.
        """
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

    def rows_of(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns the rows on the paths of the episodes ``numbers`` (at least one), int64, ascending."""
        leaves = [leaf for number in numbers for leaf in self.episodes[number].leaves]
        return rows_of_episodes(self.runs, [leaves], np.ones(self.rows, dtype=bool))[1]

    def with_extras(self, **extras: np.ndarray) -> TokenTree:
        """Returns the tree with these extras added."""
        return self._same_rows(replace(self, extras={**self.extras, **extras}))

    def without_extra(self, name: str) -> TokenTree:
        """Returns the tree without the extra ``name``, which it need not have."""
        return self._same_rows(replace(self, extras={key: self.extras[key] for key in self.extras if key != name}))

    def with_loss_mask(self, loss_mask: np.ndarray) -> TokenTree:
        """Returns the tree with another loss mask."""
        return self._same_rows(replace(self, loss_mask=loss_mask))

    def _same_rows(self, tree: TokenTree) -> TokenTree:
        tree.__dict__.update({name: self.__dict__[name] for name in _CACHED & self.__dict__.keys()})
        return tree

    def take(self, numbers: Sequence[int]) -> TokenTree:
        """Returns a tree with only the episodes ``numbers`` (ascending) and the rows on their paths.

        The result has ``counts_group`` False.
        """
        rows = self.rows_of(numbers)
        kept = np.zeros(self.rows, dtype=bool)
        kept[rows] = True
        before = np.concatenate(([0], np.cumsum(kept)))  # number of kept rows before each row
        of_tokens = np.isin(self.tokens[0], numbers)
        return replace(
            self,
            token_ids=self.token_ids[rows],
            end=before[self.end[rows]].astype(np.int32),
            loss_mask=self.loss_mask[rows],
            logprobs=self.logprobs[rows],
            versions=self.versions[rows],
            episodes=[_moved(self.episodes[number], before) for number in numbers],
            media=[_media(medium, before) for medium in self.media if kept[medium.start]],
            kept=None if self.kept is None else self.kept.take(rows),
            extras={name: extra[of_tokens if name in BY_TOKEN else rows] for name, extra in self.extras.items()},
            counts_group=False,
        )


def reward_array(rewards: Sequence[float]) -> np.ndarray:
    """Returns an array of rewards, ``[rewards]``, in float32 if float32 preserves the differences between them.

    The array is float64 if rounding to float32 would change the differences noticeably, as for 1e9 + 0.1 and 1e9 + 0.2.
    Differences that are only float64 rounding errors, as between 0.3 and 0.1 + 0.2, are ignored.
    """
    exact = np.array(rewards, dtype=np.float64)
    rounded = exact.astype(np.float32)
    spread = np.ptp(exact)
    lost = np.abs(exact - rounded).max() > _NOTICEABLE * spread
    return exact if lost and spread > _ROUNDING * np.abs(exact).max() else rounded


def check_tree(tree: TokenTree) -> None:
    """Raises ValueError, with the group's uid and the fix, for an inconsistent tree."""

    def wrong(text: str) -> ValueError:
        return ValueError(f"group {tree.group_uid}: {text}")

    arrays = {"end": tree.end, "loss_mask": tree.loss_mask, "logprobs": tree.logprobs, "versions": tree.versions}
    for name, array in arrays.items():
        if array.shape != tree.token_ids.shape:
            raise wrong(
                f"{name} has shape {list(array.shape)}, token_ids {list(tree.token_ids.shape)}: give one entry per row"
            )
    if not tree.rows or not tree.episodes:
        raise wrong("no rows, or no episode: drop a group without answers instead of putting it on the bus")
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
        raise wrong("a sampled row has no row before it: a tree begins with its prompt")
    for episode in tree.episodes:
        if any(turn.start >= turn.end for turn in episode.turns):
            raise wrong(f"episode {episode.uid} has a turn without a token: drop such an answer")
        if not all(turn.reward is None or math.isfinite(turn.reward) for turn in episode.turns):
            raise wrong(
                f"episode {episode.uid} has a turn with a reward that is not finite: use None for a turn "
                "without a reward"
            )
        rows = [*episode.leaves, *(row for turn in episode.turns for row in (turn.start, turn.end - 1))]
        if not episode.leaves or min(rows) < 0 or max(rows) >= tree.rows:
            raise wrong(f"episode {episode.uid} names row {rows}, but its group has {tree.rows} rows")
    if (fault := _fault_of_turns(tree) or _fault_of_media(tree)) is not None:
        raise wrong(fault)


def _fault_of_turns(tree: TokenTree) -> str | None:
    """Returns why a turn contradicts the rows of its episode; None if all turns are consistent.

    The caller must already have checked that the turns' rows exist in the tree.
    """
    turns = [(episode, turn) for episode in tree.episodes for turn in episode.turns]
    bounds = np.array([(turn.start, turn.end) for _, turn in turns], dtype=np.int64).ravel()
    if not len(bounds):
        return None
    # reduceat takes the minimum between successive bounds; [::2] keeps the turns and drops the rows between two turns.
    # An appended entry allows a turn to end at the last row.
    oldest = np.minimum.reduceat(np.append(tree.versions, 0), bounds)[::2].tolist()
    reaches = np.minimum.reduceat(np.append(tree.end, 0), bounds)[::2].tolist()
    for (episode, turn), version, reach in zip(turns, oldest, reaches, strict=True):
        if version < 0:
            return f"episode {episode.uid} has a turn with rows that nothing sampled"
        if not any(turn.end <= leaf + 1 <= reach for leaf in episode.leaves):
            return (
                f"episode {episode.uid} has a turn of rows {turn.start} to {turn.end}, which are on no "
                "path to its leaves"
            )
    return None


def _fault_of_media(tree: TokenTree) -> str | None:
    """Returns why the media items of a tree contradict its rows; None if they are consistent.

    A tree that was decoded without its token ids has negative ids, which are not compared.
    """
    runs, behind = tree.runs, 0
    for medium in tree.media:
        what = f"item {medium.item.digest} {medium.item.description} of rows {medium.start} to {medium.end}"
        if not 0 <= medium.start < medium.end <= tree.rows or medium.end - medium.start != medium.item.rows:
            return f"{what}: it stands for {medium.item.rows} rows, and its group has {tree.rows}"
        if medium.start < behind:
            return f"{what}: it overlaps the item before it, or the items are not in order of rows"
        first, last = runs.of_rows(np.array([medium.start, medium.end - 1]))
        if first != last:
            return f"{what}: a branch begins inside it, but an item lies in one chain"
        own = tree.token_ids[medium.start : medium.end]
        if own[0] >= 0 and not np.array_equal(own, medium.item.ids):
            return f"{what}: the ids of its rows are not those of the item"
        if (tree.versions[medium.start : medium.end] >= 0).any():
            return f"{what}: a weight version sampled one of its rows, but no engine samples media"
        behind = medium.end
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


def _media(medium: Media, before: np.ndarray) -> Media:
    return msgspec.structs.replace(medium, start=int(before[medium.start]), end=int(before[medium.end - 1]) + 1)


def group_uid(index: int) -> str:
    """Returns the uid of the group with this index."""
    return f"g{index:08d}"


def sample_uid(group: str, number: int) -> str:
    """Returns the uid of the episode with this number in a group."""
    return f"{group}.{number}"

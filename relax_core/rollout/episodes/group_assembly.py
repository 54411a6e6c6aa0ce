"""Makes a complete group for the bus from its scored episodes, and accounts for every token that they sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import TEACHER, encode_tree
from relax_core.contracts.env import CUT_ENDS
from relax_core.contracts.tree import TRUNCATED, TokenTree, group_uid
from relax_core.rollout.dynamic_sampling import GroupFilter, compared_numbers
from relax_core.rollout.episodes.episode_records import REWARD_FAILED, EpisodeRecord
from relax_core.rollout.episodes.tree_builder import build_tree

Lost = Callable[[TokenTree, Mapping[str, str]], None]  # gets the tree of dropped samples, and each one's reason
MakeExtras = Callable[[TokenTree], Mapping[str, np.ndarray]]  # computes a complete group's extras, e.g. its advantages
MIN_SAMPLES = 2  # a group-relative advantage of one sample has no meaning

# not_chosen: the episode started again without them; orphan: no client of an endpoint got the answer; no_reward: their
# episode has none; dropped: their group is not trained, or it was given up before its end; masked: the loss mask leaves
# them out; stale: their weights are older than the window, or their episode ended because of that.
REASONS = ("not_chosen", "orphan", "no_reward", "dropped", "masked", "stale")
_OF_END = {"stale": "stale", "cancelled": "dropped"}  # of episodes without a reward; of all other ends, no_reward


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Is a group with nothing to train on, and the reason."""

    group_uid: str
    reason: str


def complete_group(
    *,
    index: int,
    episodes: Sequence[EpisodeRecord],
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
    account: Callable[[Mapping[str, int]], None] = lambda counts: None,
    lost: Lost | None = None,
) -> Group | DroppedGroup:
    """Returns the group for the bus once all its episodes have ended and are scored, or why there is none.

    An episode without a reward is dropped alone. The group is dropped if fewer than two episodes of several have a
    reward, or if the only one has none. ``refuse`` may drop a complete group. ``teacher`` is the name of the teacher
    that scores the group, and ``extras`` computes further columns of a group that is kept. ``account`` gets the
    `token_accounts` of the group, and ``lost`` the episodes that are dropped.

    With ``mask_off_policy``, only tokens of the newest weight version in an episode are trained, and that version is
    the episode's. With ``mask_truncated``, no token of an episode is trained that was cut at a limit of tokens. A
    masked episode stays in the group, because its reward is part of the baseline; a group without trained tokens is
    dropped. Raises ValueError if a token is not in the kept set that it was sampled from.
    """
    uid = group_uid(index)
    kept = [one for one in episodes if one.reward is not None]
    dropped = {one.uid: one.why_dropped for one in episodes if one.reward is None}
    whole = len(kept) < min(MIN_SAMPLES, len(episodes))
    if lost is not None and dropped:
        tell_lost(lost, uid, [one for one in episodes if whole or one.reward is None])
    if whole:
        account(token_accounts(episodes, None))
        return DroppedGroup(group_uid=uid, reason=next(iter(dropped.values())))  # of the first episode that was lost
    tree = _masked(build_tree(uid, kept), mask_off_policy=mask_off_policy, mask_truncated=mask_truncated)
    trained = tree.trained_episodes()
    refused: str | None = None
    if not trained.any():
        refused = TRUNCATED
    elif refuse is not None:
        refused = refuse(compared_numbers(tree.episodes, refuse.parts if isinstance(refuse, GroupFilter) else ()))
    account(token_accounts(episodes, tree if refused is None else None))
    if refused is not None:
        if lost is not None:
            lost(tree, {one.uid: refused for one in tree.episodes})
        return DroppedGroup(group_uid=uid, reason=refused)
    oldest = tree.oldest_versions(trained=True)
    if extras is not None:
        tree = tree.with_extras(**extras(tree))
    named = {} if teacher is None else {TEACHER: msgspec.msgpack.encode(teacher)}
    return Group(
        group_uid=uid,
        index=index,
        uids=[one.uid for one in tree.episodes],
        versions=np.maximum(oldest, oldest[trained].min()).tolist(),  # untrained tokens do not make a group stale
        columns=encode_tree(tree) | named,
        dropped=dropped,
    )


def _masked(tree: TokenTree, *, mask_off_policy: bool, mask_truncated: bool) -> TokenTree:
    """Returns the tree with the loss mask that `complete_group` explains."""
    if not (mask_off_policy or mask_truncated):
        return tree
    loss_mask = tree.loss_mask.copy()
    for one in tree.episodes:
        newest = max(version for turn in one.turns for version, _ in turn.versions)
        for turn in one.turns:
            own = slice(turn.start, turn.end)  # no other episode has these rows, because each draw has its own rows
            if mask_off_policy:
                loss_mask[own] = tree.versions[own] == newest
            if mask_truncated and one.ended in CUT_ENDS:
                loss_mask[own] = False
    return tree.with_loss_mask(loss_mask)


def tell_lost(lost: Lost, uid: str, episodes: Sequence[EpisodeRecord], *, reason: str = "") -> None:
    """Gives ``lost`` the tree of those episodes of group ``uid`` that have sampled tokens, if there are any.

    ``reason`` is why all are dropped. If it is empty, each has its own; the reason of an episode with a reward is that
    of the whole group.
    """
    gone = [one for one in episodes if one.turns and all(len(turn.response.output_ids) for turn in one.turns)]
    if gone:
        reasons = {one.uid: reason or one.why_dropped for one in gone}
        words = {one.uid: one.output.reason for one in gone if one.output.reason and reasons[one.uid] == REWARD_FAILED}
        lost(build_tree(uid, gone), reasons | {of: f"{REWARD_FAILED}: {text}" for of, text in words.items()})


def token_accounts(
    episodes: Sequence[EpisodeRecord], tree: TokenTree | None, *, oldest_version: int = 0
) -> dict[str, int]:
    """Returns how many tokens the episodes sampled, how many of them are trained, and the others by reason.

    ``tree`` is the group's datum, None if the group was dropped. Rows of weights older than ``oldest_version`` are not
    trained. The sum of all counts but "sampled" is "sampled".
    """
    counts = dict.fromkeys(("trained", *REASONS), 0)
    for episode in episodes:
        counts["not_chosen"] += episode.not_chosen
        counts["orphan"] += episode.orphan
        sampled = sum(len(turn.response.output_ids) for turn in episode.turns)
        if episode.reward is None:
            counts[_OF_END.get(episode.ended or "", "no_reward")] += sampled
        elif tree is None:
            counts["dropped"] += sampled
    if tree is not None:
        _, rows = tree.tokens
        assert np.bincount(rows).max(initial=0) <= 1, "each draw has rows of its own"
        stale = tree.versions[rows] < oldest_version
        mask = tree.loss_mask[rows]
        counts["trained"] = int((mask & ~stale).sum())
        counts["stale"] += int((mask & stale).sum())
        counts["masked"] = int((~mask).sum())
    counts["sampled"] = sum(counts.values())
    whole = sum(len(turn.response.output_ids) for one in episodes for turn in one.turns)
    assert counts["sampled"] == whole + counts["not_chosen"] + counts["orphan"], "a sampled token is in no account"
    return counts

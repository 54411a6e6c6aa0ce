"""From an engine's responses and their rewards to a complete group, ready for the bus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.bus import GroupRow
from relax_core.contracts.columns import ROUTED_EXPERTS, TEACHER, encode_tree
from relax_core.contracts.engine import Generated
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import NOT_SAMPLED, TRUNCATED, Episode, TokenTree, Turn, group_uid, sample_uid
from relax_core.rollout.episodes.tree_builder import PlayedEpisode, build_tree, checked_kept, version_runs

MakeExtras = Callable[[TokenTree], Mapping[str, np.ndarray]]  # what is put with a complete group, e.g. its advantages
REWARD_FAILED = "reward_failed"
CUT = ("turn_cut", "context_full")  # how an episode of several turns ends that was cut
MIN_SAMPLES = 2  # a group-relative advantage of one sample says nothing


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that yields nothing to train, and why."""

    group_uid: str
    reason: str


class GroupFilter:
    """An algorithm's `drop_group`, and how many groups it refused since the last that it kept."""

    def __init__(self, drop_group: Callable[[Sequence[float], int], str | None]) -> None:
        self._drop_group = drop_group
        self._dropped_in_a_row = 0

    def __call__(self, rewards: Sequence[float]) -> str | None:
        """Why a group with these rewards is refused; None for a group to keep."""
        reason = self._drop_group(rewards, self._dropped_in_a_row)
        self._dropped_in_a_row = 0 if reason is None else self._dropped_in_a_row + 1
        return reason


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response with its reward: an episode of one turn. ``trained_from``: its first token that is trained."""

    uid: str
    response: Generated
    output: RewardOutput
    trained_from: int


def trained_from(generated: Generated, *, mask_off_policy: bool, mask_truncated: bool) -> int:
    """The first token of a response that is trained. ``mask_off_policy``: of a response that several weight versions
    made, only the newest one's tokens are; its version is then that one. ``mask_truncated``: of a response that was cut
    at its limit none is."""
    versions = generated.versions
    if mask_truncated and generated.finish_reason == "length":
        return len(versions)
    if mask_off_policy and len(versions):
        return int(versions.argmax())  # the first token of the newest version
    return 0


def one_turn_tree(uid: str, prompt_ids: Sequence[int], answers: Sequence[Answer]) -> TokenTree:
    """The prompt as trunk, each answer as a branch. Raises ValueError for a kept set without the token that was sampled
    from it."""
    trunk, lengths = len(prompt_ids), np.array([len(one.response.output_ids) for one in answers])
    behind = trunk + np.cumsum(lengths)
    rows = int(behind[-1])
    token_ids, end = np.empty(rows, dtype=np.int32), np.full(rows, rows, dtype=np.int32)
    logprobs, loss_mask = np.zeros(rows, dtype=np.float32), np.zeros(rows, dtype=bool)
    versions = np.full(rows, NOT_SAMPLED, dtype=np.int32)
    token_ids[:trunk] = prompt_ids
    episodes = []
    for one, length, last in zip(answers, lengths.tolist(), behind.tolist(), strict=True):
        response, first = one.response, last - length
        token_ids[first:last] = response.output_ids
        end[first:last] = last
        logprobs[first:last] = response.logprobs
        versions[first:last] = own = response.versions
        loss_mask[first + one.trained_from : last] = True
        turn = Turn(first, last, response.engine, version_runs(own), response.finish_reason)
        parts = {"exact": float(one.output.exact), **(one.output.parts or {})}
        episodes.append(Episode(one.uid, [last - 1], one.output.reward, parts, [turn], response.finish_reason))
    experts = _experts(trunk, answers)
    return TokenTree(
        group_uid=uid,
        token_ids=token_ids,
        end=end,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        episodes=episodes,
        kept=_kept(trunk, answers),
        extras={} if experts is None else {ROUTED_EXPERTS: experts},
    )


def _kept(trunk: int, answers: Sequence[Answer]) -> KeptTokens | None:
    """One kept set a row; those of the prompt leave nothing out."""
    checked = [checked_kept(one.response, what=f"sample {one.uid}") for one in answers]
    kept = [own for own in checked if own is not None]
    if not kept:
        return None
    assert len(kept) == len(answers), "asked for with every prompt of a run or with none"
    return KeptTokens.joined([KeptTokens.whole(trunk, vocab_size=kept[0].vocab_size), *kept])


def _experts(trunk: int, answers: Sequence[Answer]) -> np.ndarray | None:
    """What each row was routed to, ``[rows, layers, experts a token]``; 0 for the last token of an answer, which no
    engine ever feeds."""
    of_prompt = next((one.response.prompt_experts for one in answers if one.response.prompt_experts is not None), None)
    if of_prompt is None:
        return None
    parts = [of_prompt]
    for one in answers:
        own = one.response.response_experts
        assert own is not None, "asked for with every prompt of a run or with none"
        parts += [own, np.zeros_like(parts[0][:1])]
    assert len(parts[0]) == trunk
    return np.concatenate(parts)


def complete_group(
    *,
    index: int,
    prompt_ids: list[int],
    generated: Sequence[Generated],
    rewards: Sequence[RewardOutput],
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
) -> GroupRow | DroppedGroup:
    """The bus row of a group whose every response is in, or the reason why there is none.

    A response whose reward is None is dropped alone; with fewer than two left of several, or none of one, the group is.
    None was aborted: the engine pool goes on with those.
    ``refuse`` may drop a group that is complete. ``teacher``: the name that travels with the row, where there is one.
    ``extras``: makes what travels with the rows of a group that is kept.
    ``mask_off_policy``, ``mask_truncated``: see `trained_from`. A masked episode stays in the row, as its reward is
    part of the group's baseline; a group without one trained token is dropped.
    """
    uid = group_uid(index)
    kept: list[Answer] = []
    dropped: dict[str, str] = {}
    for response, output in sorted(zip(generated, rewards, strict=True), key=lambda pair: pair[0].sample):
        one = sample_uid(uid, response.sample)
        if output.reward is None:
            dropped[one] = REWARD_FAILED
        else:
            first = trained_from(response, mask_off_policy=mask_off_policy, mask_truncated=mask_truncated)
            kept.append(Answer(uid=one, response=response, output=output, trained_from=first))
    if len(kept) < min(MIN_SAMPLES, len(generated)):
        return DroppedGroup(group_uid=uid, reason=REWARD_FAILED)
    tree = one_turn_tree(uid, prompt_ids, kept)
    return _complete(tree, index=index, dropped=dropped, refuse=refuse, teacher=teacher, extras=extras)


def complete_episodes(
    *,
    index: int,
    episodes: Sequence[PlayedEpisode],
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
) -> GroupRow | DroppedGroup:
    """`complete_group` for the ended episodes of an env with turns, in order. ``mask_off_policy``: of an episode that
    several weight versions made, only the newest one's tokens are trained. ``mask_truncated``: of an episode that was
    cut, at a response's limit or at the context's, none is."""
    uid = group_uid(index)
    kept = [one for one in episodes if one.reward is not None]
    dropped = {one.uid: REWARD_FAILED for one in episodes if one.reward is None}
    if len(kept) < min(MIN_SAMPLES, len(episodes)):
        return DroppedGroup(group_uid=uid, reason=REWARD_FAILED)
    tree = build_tree(uid, kept)
    if mask_off_policy or mask_truncated:
        loss_mask = tree.loss_mask.copy()
        for one in tree.episodes:
            newest = max(version for turn in one.turns for version, _ in turn.versions)
            for turn in one.turns:
                own = slice(turn.start, turn.end)  # an episode's own: a draw has one episode
                if mask_off_policy:
                    loss_mask[own] = tree.versions[own] == newest
                if mask_truncated and one.ended in CUT:
                    loss_mask[own] = False
        tree = tree.with_loss_mask(loss_mask)
    return _complete(tree, index=index, dropped=dropped, refuse=refuse, teacher=teacher, extras=extras)


def _complete(
    tree: TokenTree,
    *,
    index: int,
    dropped: dict[str, str],
    refuse: GroupFilter | None,
    teacher: str | None,
    extras: MakeExtras | None,
) -> GroupRow | DroppedGroup:
    uid = tree.group_uid
    trained = tree.trained_episodes()
    if not trained.any():
        return DroppedGroup(group_uid=uid, reason=TRUNCATED)
    refused = None if refuse is None else refuse([one.reward for one in tree.episodes if one.reward is not None])
    if refused is not None:
        return DroppedGroup(group_uid=uid, reason=refused)
    oldest = tree.oldest_versions(trained=True)
    if extras is not None:
        tree = tree.with_extras(**extras(tree))
    named = {} if teacher is None else {TEACHER: msgspec.msgpack.encode(teacher)}
    return GroupRow(
        group_uid=uid,
        index=index,
        uids=[one.uid for one in tree.episodes],
        versions=np.maximum(oldest, oldest[trained].min()).tolist(),  # what is not trained makes no row stale
        columns=encode_tree(tree) | named,
        dropped=dropped,
    )

"""Makes a complete group for the bus from an engine's responses and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import ROUTED_EXPERTS, TEACHER, encode_tree
from relax_core.contracts.engine import Generated
from relax_core.contracts.env import CUT_ENDS
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import NOT_SAMPLED, TRUNCATED, Episode, TokenTree, Turn, group_uid, sample_uid
from relax_core.rollout.episodes.token_accounts import token_accounts
from relax_core.rollout.episodes.tree_builder import PlayedEpisode, build_tree, checked_kept, version_spans

Lost = Callable[[TokenTree, Mapping[str, str]], None]  # gets the tree of dropped samples, and each one's reason
MakeExtras = Callable[[TokenTree], Mapping[str, np.ndarray]]  # computes a complete group's extras, e.g. its advantages
REWARD_FAILED = "reward_failed"
MIN_SAMPLES = 2  # a group-relative advantage of one sample has no meaning


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Is a group with nothing to train on, and the reason."""

    group_uid: str
    reason: str


class GroupFilter:
    """Is an algorithm's `drop_group` with the number of groups that it dropped since the last one that it kept.

    ``parts`` names the parts of a reward that is a sum. Its filter compares the first part that all samples have, which
    says whether an answer is exact, because further parts would make wrong answers differ.
    """

    def __init__(self, drop_group: Callable[[Sequence[float], int], str | None], *, parts: Sequence[str] = ()) -> None:
        self._drop_group = drop_group
        self.parts = parts
        self._dropped_in_a_row = 0

    def __call__(self, rewards: Sequence[float]) -> str | None:
        """Returns why a group with these rewards is dropped, or None to keep it."""
        reason = self._drop_group(rewards, self._dropped_in_a_row)
        self._dropped_in_a_row = 0 if reason is None else self._dropped_in_a_row + 1
        return reason


@dataclass(frozen=True, kw_only=True)
class ScoredResponse:
    """Is one response with its reward, which is an episode of one turn; ``trained_from`` is its first trained token."""

    uid: str
    response: Generated
    output: RewardOutput
    trained_from: int


def trained_from(generated: Generated, *, mask_off_policy: bool, mask_truncated: bool) -> int:
    """Returns the index of a response's first trained token.

    With ``mask_off_policy``, only the tokens of the newest weight version in the response are trained, and that version
    is the response's version. With ``mask_truncated``, no token of a response that reached its length limit is trained.
    """
    versions = generated.versions
    if mask_truncated and generated.finish_reason == "length":
        return len(versions)
    if mask_off_policy and len(versions):
        return int(versions.argmax())  # the first token of the newest version
    return 0


def one_turn_tree(
    uid: str, prompt_ids: Sequence[int], answers: Sequence[ScoredResponse], *, media: Sequence[Media] = ()
) -> TokenTree:
    """Returns a tree with the prompt as its trunk and each answer as a branch; ``media`` places items in the prompt.

    Raises ValueError if a token is not in the kept set that it was sampled from.
    """
    trunk, lengths = len(prompt_ids), np.array([len(one.response.output_ids) for one in answers])
    branch_ends = trunk + np.cumsum(lengths)
    rows = int(branch_ends[-1])
    token_ids, end = np.empty(rows, dtype=np.int32), np.full(rows, rows, dtype=np.int32)
    logprobs, loss_mask = np.zeros(rows, dtype=np.float32), np.zeros(rows, dtype=bool)
    versions = np.full(rows, NOT_SAMPLED, dtype=np.int32)
    token_ids[:trunk] = prompt_ids
    episodes = []
    for one, length, last in zip(answers, lengths.tolist(), branch_ends.tolist(), strict=True):
        response, first = one.response, last - length
        token_ids[first:last] = response.output_ids
        end[first:last] = last
        logprobs[first:last] = response.logprobs
        versions[first:last] = own = response.versions
        loss_mask[first + one.trained_from : last] = True
        turn = Turn(first, last, response.engine, version_spans(own), response.finish_reason)
        parts = {"exact": float(one.output.exact), **(one.output.parts or {})}
        ended, why = response.finish_reason, one.output.why
        episodes.append(Episode(one.uid, [last - 1], one.output.reward, parts, [turn], ended, why))
    experts = _experts(trunk, answers)
    return TokenTree(
        group_uid=uid,
        token_ids=token_ids,
        end=end,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        episodes=episodes,
        media=media,
        kept=_kept(trunk, answers),
        extras={} if experts is None else {ROUTED_EXPERTS: experts},
    )


def _kept(trunk: int, answers: Sequence[ScoredResponse]) -> KeptTokens | None:
    """Returns one kept set per row, or None without kept sets; the sets of prompt rows hold the whole vocabulary."""
    checked = [
        checked_kept(
            one.response.kept,
            one.response.output_ids,
            origin=f"{one.response.engine or 'the engine'}, sample {one.uid}",
        )
        for one in answers
    ]
    kept = [own for own in checked if own is not None]
    if not kept:
        return None
    assert len(kept) == len(answers), "either all prompts of a run ask for kept sets or none does"
    return KeptTokens.joined([KeptTokens.whole(trunk, vocab_size=kept[0].vocab_size), *kept])


def _experts(trunk: int, answers: Sequence[ScoredResponse]) -> np.ndarray | None:
    """Returns the experts of each row, ``[rows, layers, experts per token]``, or None if they were not recorded.

    The last token of an answer has zeros, because an engine does not run the model on it.
    """
    of_prompt = next((one.response.prompt_experts for one in answers if one.response.prompt_experts is not None), None)
    if of_prompt is None:
        return None
    parts = [of_prompt]
    for one in answers:
        own = one.response.response_experts
        assert own is not None, "either all prompts of a run ask for routed experts or none does"
        parts += [own, np.zeros_like(parts[0][:1])]
    assert len(parts[0]) == trunk
    return np.concatenate(parts)


def complete_group(
    *,
    index: int,
    prompt_ids: list[int],
    generated: Sequence[Generated],
    rewards: Sequence[RewardOutput],
    media: Sequence[Media] = (),
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
    lost: Lost | None = None,
) -> Group | DroppedGroup:
    """Returns the group for the bus once all its responses are in, or why there is none.

    A response without a reward is dropped alone. The group is dropped if fewer than two responses of several have a
    reward, or if the only one has none. ``media`` places items in the prompt. ``refuse`` may drop a complete group.
    ``teacher`` is the name of the teacher that scores the group, and ``extras`` computes further columns of a group
    that is kept. ``lost`` gets the samples that are dropped.

    `trained_from` explains ``mask_off_policy`` and ``mask_truncated``. A masked episode stays in the group, because its
    reward is part of the baseline; a group without trained tokens is dropped. No response here was aborted, because
    the engine pool continues aborted ones.
    """
    uid = group_uid(index)
    kept: list[ScoredResponse] = []
    without: list[ScoredResponse] = []
    for response, output in sorted(zip(generated, rewards, strict=True), key=lambda pair: pair[0].sample):
        first = trained_from(response, mask_off_policy=mask_off_policy, mask_truncated=mask_truncated)
        one = ScoredResponse(uid=sample_uid(uid, response.sample), response=response, output=output, trained_from=first)
        (without if output.reward is None else kept).append(one)
    dropped = {one.uid: REWARD_FAILED for one in without}
    whole = len(kept) < min(MIN_SAMPLES, len(generated))
    if lost is not None and without:
        gone = [one for one in [*without, *(kept if whole else [])] if len(one.response.output_ids)]
        if gone:
            why = {one.uid: f"{REWARD_FAILED}: {one.output.reason}".removesuffix(": ") for one in gone}
            lost(one_turn_tree(uid, prompt_ids, gone, media=media), why)
    if whole:
        return DroppedGroup(group_uid=uid, reason=REWARD_FAILED)
    tree = one_turn_tree(uid, prompt_ids, kept, media=media)
    return _complete(tree, index=index, dropped=dropped, refuse=refuse, teacher=teacher, extras=extras, lost=lost)


def complete_episodes(
    *,
    index: int,
    episodes: Sequence[PlayedEpisode],
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
    account: Callable[[Mapping[str, int]], None] = lambda counts: None,
    lost: Lost | None = None,
) -> Group | DroppedGroup:
    """Returns the group of an env of several turns for the bus, like `complete_group`, or why there is none.

    ``episodes`` are the ended episodes in order. With ``mask_off_policy``, only tokens of the newest weight version in
    an episode are trained. With ``mask_truncated``, no token of an episode is trained that was cut at a limit of
    tokens. ``account`` gets the `token_accounts` of the group, and ``lost`` the episodes that are dropped.
    """
    uid = group_uid(index)
    kept = [one for one in episodes if one.reward is not None]
    dropped = {one.uid: one.dropped or REWARD_FAILED for one in episodes if one.reward is None}
    whole = len(kept) < min(MIN_SAMPLES, len(episodes))
    if lost is not None and dropped:
        tell_lost(lost, uid, [one for one in episodes if whole or one.reward is None], dropped)
    if whole:
        account(token_accounts(episodes, None))
        return DroppedGroup(group_uid=uid, reason=next(iter(dropped.values())))  # of the first episode that was lost
    tree = build_tree(uid, kept)
    if mask_off_policy or mask_truncated:
        loss_mask = tree.loss_mask.copy()
        for one in tree.episodes:
            newest = max(version for turn in one.turns for version, _ in turn.versions)
            for turn in one.turns:
                own = slice(turn.start, turn.end)  # no other episode has these rows, because each draw has its own rows
                if mask_off_policy:
                    loss_mask[own] = tree.versions[own] == newest
                if mask_truncated and one.ended in CUT_ENDS:
                    loss_mask[own] = False
        tree = tree.with_loss_mask(loss_mask)
    done = _complete(tree, index=index, dropped=dropped, refuse=refuse, teacher=teacher, extras=extras, lost=lost)
    account(token_accounts(episodes, tree if isinstance(done, Group) else None))
    return done


def tell_lost(
    lost: Lost, uid: str, episodes: Sequence[PlayedEpisode], reasons: Mapping[str, str], *, others: str = REWARD_FAILED
) -> None:
    """Gives ``lost`` the tree of those episodes of group ``uid`` that have sampled tokens, if there are any.

    ``reasons`` maps an episode's uid to why it is dropped, and ``others`` is the reason of those that it does not name.
    """
    gone = [one for one in episodes if one.turns and all(len(turn.response.output_ids) for turn in one.turns)]
    if gone:
        lost(build_tree(uid, gone), {one.uid: reasons.get(one.uid, others) for one in gone})


def _compared(episodes: Sequence[Episode], parts: Sequence[str]) -> list[float]:
    """Returns the number of each episode that a filter compares, as `GroupFilter` says."""
    for label in parts:
        if all(label in one.parts for one in episodes):
            return [one.parts[label] for one in episodes]
    return [one.reward for one in episodes if one.reward is not None]


def _complete(
    tree: TokenTree,
    *,
    index: int,
    dropped: dict[str, str],
    refuse: GroupFilter | None,
    teacher: str | None,
    extras: MakeExtras | None,
    lost: Lost | None,
) -> Group | DroppedGroup:
    uid = tree.group_uid
    trained = tree.trained_episodes()
    refused: str | None = None
    if not trained.any():
        refused = TRUNCATED
    elif refuse is not None:
        refused = refuse(_compared(tree.episodes, refuse.parts if isinstance(refuse, GroupFilter) else ()))
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

"""From an engine's responses and their rewards to a complete group, ready for the bus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from relax_core.contracts.bus import GroupRow
from relax_core.contracts.columns import TEACHER, encode_group
from relax_core.contracts.engine import Generated
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.sample import TRUNCATED, Group, Sample, VersionSpan, group_uid, sample_uid

REWARD_FAILED = "reward_failed"
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


def to_sample(
    generated: Generated,
    output: RewardOutput,
    *,
    uid: str,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
) -> Sample:
    """``mask_off_policy``: of a response that several weight versions made, only the newest one's tokens are trained;
    its version is then that one. ``mask_truncated``: of a response that was cut at its limit nothing is trained. Raises
    ValueError for a kept set without the token that was sampled from it."""
    tokens = len(generated.output_ids)
    if generated.kept is not None and (fault := generated.kept.fault(generated.output_ids)) is not None:
        raise ValueError(f"{generated.engine or 'the engine'}, sample {uid}: {fault}")
    trained_from = 0
    if mask_off_policy and tokens:
        trained_from = int(generated.versions.argmax())  # the first token of the newest version
    if mask_truncated and generated.finish_reason == "length":
        trained_from = tokens
    return Sample(
        uid=uid,
        response_ids=generated.output_ids,
        rollout_logprobs=generated.logprobs,
        loss_mask=[0] * trained_from + [1] * (tokens - trained_from),
        weight_versions=_spans(generated.versions),
        finish_reason=generated.finish_reason,
        reward=output.reward,
        reward_parts={"exact": float(output.exact), **(output.parts or {})},
        engine=generated.engine,
        routed_experts=generated.response_experts,
        kept=generated.kept,
    )


def _spans(versions: np.ndarray) -> list[VersionSpan]:
    """The spans of tokens that one weight version sampled, of int32 ``[tokens]``."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()] if versions.size else []
    ends = [*starts[1:], len(versions)]
    return [VersionSpan(start, end, int(versions[start])) for start, end in zip(starts, ends, strict=False)]


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
) -> GroupRow | DroppedGroup:
    """The bus row of a group whose every response is in, or the reason why there is none.

    A response whose reward is None is dropped alone; with fewer than two left of several, or none of one, the group is.
    None was aborted: the engine pool goes on with those.
    ``refuse`` may drop a group that is complete. ``teacher``: the name that travels with the row, where there is one.
    ``mask_off_policy``, ``mask_truncated``: see `to_sample`. A masked sample stays in the row, as its reward is part of
    the group's baseline; a group without one trained token is dropped.
    """
    uid = group_uid(index)
    kept: list[Sample] = []
    dropped: dict[str, str] = {}
    for response, output in sorted(zip(generated, rewards, strict=True), key=lambda pair: pair[0].sample):
        one = sample_uid(uid, response.sample)
        if output.reward is None:
            dropped[one] = REWARD_FAILED
        else:
            kept.append(
                to_sample(response, output, uid=one, mask_off_policy=mask_off_policy, mask_truncated=mask_truncated)
            )
    if len(kept) < min(MIN_SAMPLES, len(generated)):
        return DroppedGroup(group_uid=uid, reason=REWARD_FAILED)
    trained = [sample.version for sample in kept if any(sample.loss_mask)]
    if not trained:
        return DroppedGroup(group_uid=uid, reason=TRUNCATED)
    refused = None if refuse is None else refuse([sample.reward for sample in kept if sample.reward is not None])
    if refused is not None:
        return DroppedGroup(group_uid=uid, reason=refused)
    named = {} if teacher is None else {TEACHER: msgspec.msgpack.encode(teacher)}
    group = Group(
        group_uid=uid,
        index=index,
        prompt_ids=prompt_ids,
        samples=kept,
        routed_experts=next((one.prompt_experts for one in generated if one.prompt_experts is not None), None),
    )
    return GroupRow(
        group_uid=uid,
        index=index,
        uids=[sample.uid for sample in kept],
        versions=[max(sample.version, min(trained)) for sample in kept],  # what is not trained makes no row stale
        columns=encode_group(group) | named,
        dropped=dropped,
    )

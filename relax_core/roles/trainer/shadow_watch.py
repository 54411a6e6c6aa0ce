"""Detects reward hacking: a model learns answers that the reward accepts and the shadow reward rejects.

The metric is the denied share: among the answers that the reward accepts, the share that the shadow reward rejects. If
the shadow reward cannot read some forms of correct answers, the denied share is constant. If the model exploits the
reward, the denied share rises. Therefore the denied share of the newest steps is compared with the denied share of the
run's first steps. The mean reward and the length of answers are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from relax_core.contracts.reward import SHADOW, SHADOW_GAP

HACK_ONSET = "hack_onset"  # metric: the train step at which the denied share began to rise; only during an alarm
DENIED, USUAL = "shadow_denied", "shadow_denied/usual"  # metrics: the newest denied share, and the usual denied share
BASE_STEPS, BASE_RIGHT = 5, 40  # minimum number of steps and accepted answers for the usual denied share
NEWEST_STEPS, NEWEST_GROUPS = 3, 6  # minimum number of steps and groups for a judgement
MAX_STEPS = 12  # most steps that are compared; the onset is one of them
GROUPS_WITH_GAP = 3  # minimum, because a single unusual prompt is no exploit
MIN_GAP = 0.1  # minimum gap, as a share of all answers
ERRORS = 4.0  # minimum excess of denied answers in standard errors, so chance cannot explain it
# An alarm begins when the denied share is above the usual share by RISE, at most 1/2 of the distance to 1. It ends when
# the difference is below STAYS, at most 1/4 of the distance to 1.
RISE, STAYS = 0.2, 0.1


class ShadowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the groups and answers of one train step that the shadow reward scored.

    ``right`` is the number of answers that the reward accepts. ``gap`` is this number minus the number of answers that
    the shadow reward accepts. ``gap_groups`` is the number of groups with a gap above 0.
    """

    step: int
    groups: int
    gap_groups: int
    answers: int
    right: float
    gap: float


def shadow_counts(step: int, groups: Iterable[Sequence[Mapping[str, float]]]) -> ShadowCounts:
    """Returns the counts of a step; ``groups`` has, for each group, the reward parts of its answers."""
    scored = [[part for part in parts if SHADOW in part] for parts in groups]
    gaps = [sum(part[SHADOW_GAP] for part in parts) for parts in scored if parts]
    right = sum(part[SHADOW] + part[SHADOW_GAP] for parts in scored for part in parts)
    return ShadowCounts(
        step=step,
        groups=len(gaps),
        gap_groups=sum(gap > 0 for gap in gaps),
        answers=sum(map(len, scored)),
        right=right,
        gap=sum(gaps),
    )


class ShadowWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the state of the detection after some steps. Checkpoints contain this state.

    ``base`` is the sum of the counts of the first ``base_steps`` steps. ``recent`` has the counts of the newest steps.
    ``onset`` is the train step at which the denied share began to rise, None without an alarm.
    """

    base: ShadowCounts | None = None
    base_steps: int = 0
    recent: tuple[ShadowCounts, ...] = ()
    onset: int | None = None

    def after(self, counts: ShadowCounts) -> ShadowWatch:
        """Returns the state after one more step."""
        if not counts.groups:
            return self
        base, steps = self.base, self.base_steps
        if self.usual is None:
            base, steps = counts if base is None else _sum([base, counts]), steps + 1
        after = ShadowWatch(base=base, base_steps=steps, recent=(*self.recent, counts)[-MAX_STEPS:])
        return msgspec.structs.replace(after, onset=_onset(after, before=self.onset))

    @property
    def usual(self) -> float | None:
        """Returns the usual denied share, from the first steps; None until these steps are done."""
        if self.base is None or self.base_steps < BASE_STEPS or self.base.right < BASE_RIGHT:
            return None
        return denied_share([self.base])

    @property
    def denied(self) -> float:
        """Returns the denied share of the newest steps."""
        return denied_share(_newest(self.recent))


def watch_values(watch: ShadowWatch) -> dict[str, float]:
    """Returns the state as metrics; empty during the first steps."""
    if watch.usual is None:
        return {}
    onset = {} if watch.onset is None else {HACK_ONSET: float(watch.onset)}
    return {DENIED: watch.denied, USUAL: watch.usual, **onset}


def denied_share(counts: Sequence[ShadowCounts]) -> float:
    """Returns the share of the accepted answers that the shadow reward rejects; 0 without accepted answers."""
    right = sum(count.right for count in counts)
    return max(0.0, sum(count.gap for count in counts) / right) if right else 0.0


def _sum(counts: Sequence[ShadowCounts]) -> ShadowCounts:
    """Returns the sums over some steps; ``step`` is the newest step."""
    return ShadowCounts(
        step=counts[-1].step,
        groups=sum(count.groups for count in counts),
        gap_groups=sum(count.gap_groups for count in counts),
        answers=sum(count.answers for count in counts),
        right=sum(count.right for count in counts),
        gap=sum(count.gap for count in counts),
    )


def _newest(recent: Sequence[ShadowCounts]) -> Sequence[ShadowCounts]:
    """Returns the smallest number of newest steps that is enough for a judgement, or all steps."""
    for first in range(len(recent) - NEWEST_STEPS, -1, -1):
        if sum(count.groups for count in recent[first:]) >= NEWEST_GROUPS:
            return recent[first:]
    return recent


def _onset(watch: ShadowWatch, *, before: int | None) -> int | None:
    usual, base, newest = watch.usual, watch.base, _newest(watch.recent)
    if (
        usual is None
        or base is None
        or len(newest) < NEWEST_STEPS
        or sum(count.groups for count in newest) < NEWEST_GROUPS
    ):
        return before
    seen = _sum(newest)
    denied = denied_share([seen])
    if before is not None:
        return before if denied >= usual + min(STAYS, (1.0 - usual) / 4) else None
    # The factor (1 + …) is for the error of the usual share, which is also an estimate. The 0.02 keeps the variance
    # above 0 for a usual share of 0.
    by_chance = math.sqrt(seen.right * (1.0 + seen.right / base.right) * (usual * (1.0 - usual) + 0.02))
    is_wide = seen.gap >= MIN_GAP * seen.answers and seen.gap_groups >= GROUPS_WITH_GAP
    is_sure = seen.gap - usual * seen.right >= ERRORS * by_chance
    if not (is_wide and is_sure) or denied < usual + min(RISE, (1.0 - usual) / 2):
        return None
    onset = seen.step
    for count in reversed(watch.recent):
        if count.gap <= 0 or denied_share([count]) < usual + STAYS:
            break
        onset = count.step
    return onset

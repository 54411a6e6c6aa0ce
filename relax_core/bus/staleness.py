"""The staleness rule: selects the groups to admit, the groups for a lease, and the groups that are too old.

Train step t starts from weight version t and produces version t + 1. The step may train an episode if t minus the
weight version of the episode's oldest trained token is at most ``max_staleness``. The module applies this rule to:

- admission: a group is admitted only if a step inside the window can consume it;
- selection: the actor first gets the groups that leave the window next;
- the end of groups: a group that has left the window ends as ``stale``; a group that over-sampling added and no step
  needs ends as ``over_sampled``. The rollout ends a multi-turn episode early if the episode would become stale
  (`StalenessCheck`).

With mode.on_stale=mask, the actor also gets stale groups, and `relax_core.train.micro_batches.decode_train_tree` masks
the tokens that are too old.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from relax_core.bus.settings import ACTOR, BusSettings
from relax_core.contracts.bus import LeaseRequest
from relax_core.contracts.columns import EPISODES, decode_episodes

if TYPE_CHECKING:
    from relax_core.bus.replay_buffer import OpenGroup, ReplayBuffer

STALE = "stale"
OVER_SAMPLED = "over_sampled"
log = logging.getLogger(__name__)


class StalenessWindow(Protocol):
    """Declares the size of the staleness window; `BusSettings` and the section ``mode`` implement it."""

    @property
    def max_staleness(self) -> int:
        """Returns the maximum number of weight versions between a trained token and its train step."""


def oldest_version(step: int, window: StalenessWindow) -> int:
    """Returns the oldest weight version that a token of train step ``step`` may have."""
    return step - window.max_staleness


def admissible_versions(core: ReplayBuffer, max_groups: int) -> list[int]:
    """Returns the ``min_version`` of each group to admit now, at most ``max_groups`` groups."""
    supply = [group.ready_from(core.version) for group in core.groups.values() if group.actor_step != core.version]
    return plan_admissions(
        supply, core.settings, version=core.version, slots_left=core.slots_left(), max_groups=max_groups
    )


def plan_admissions(
    supply_versions: Iterable[int], settings: BusSettings, *, version: int, slots_left: int, max_groups: int
) -> list[int]:
    """Returns the ``min_version`` of each group to admit now, at most ``max_groups`` groups.

    ``supply_versions`` has an entry for every group that is not leased for step ``version``: the first weight version
    at which the group can be trained. A new group is planned for the first step c that lacks groups: the steps up to c
    have more slots than trainable groups. The group is admitted if c is at most one step past the window and inside the
    run.

    If no group is lost, group k is planned for step k // groups_per_step. If a group is lost, the next new group fills
    its slot, because older groups may still wait in the engine for a later version.

    ``settings.spare_groups`` groups are admitted in addition. With ``surplus`` "drop", this number applies to each
    step. With "keep", it applies once to the whole run, because unused groups stay available for the next step.
    """
    steps, spare_groups = window_steps(version, settings), settings.spare_groups
    spares = [spare_groups if settings.surplus == "keep" else spare_groups * (ahead + 1) for ahead in range(steps)]
    wanted = [slots_left + ahead * settings.groups_per_step + spares[ahead] for ahead in range(steps)]
    return fill(wanted, supply_versions, settings, version=version, max_groups=max_groups)


def window_steps(version: int, settings: BusSettings) -> int:
    """Returns the number of steps, starting with step ``version``, for which groups may be admitted."""
    return max(0, min(version + settings.max_staleness + 1, settings.total_steps - 1) - version + 1)


def fill(
    wanted: Sequence[int], supply_versions: Iterable[int], window: StalenessWindow, *, version: int, max_groups: int
) -> list[int]:
    """Returns the ``min_version`` of each new group. ``wanted[k]`` groups are needed up to step version + k."""
    # supply[k] counts the groups that can first be trained at step version + k.
    supply = [0] * len(wanted)
    for ready_from in supply_versions:
        if ready_from - version < len(wanted):
            supply[max(0, ready_from - version)] += 1
    admitted: list[int] = []
    groups_by_step = 0
    for ahead, count in enumerate(supply):
        groups_by_step += count
        while groups_by_step < wanted[ahead] and len(admitted) < max_groups:
            admitted.append(max(0, oldest_version(version + ahead, window)))
            groups_by_step += 1
    return admitted


def keeps_order(settings: BusSettings) -> bool:
    """Returns whether train steps use groups in order of issue: at staleness 0 without over-sampling."""
    return settings.max_staleness == 0 and not settings.spare_groups


def choose(core: ReplayBuffer, request: LeaseRequest) -> list[OpenGroup]:
    """Returns the groups for a lease. A request of the actor must be for the current step.

    With over-sampling, more groups exist than the step needs, so the step does not wait for groups in flight.
    """
    columns, most, settings = request.columns, request.max_groups, core.settings
    if request.task != ACTOR:
        return choose_for_worker(core.groups.values(), task=request.task, columns=columns, max_groups=most)
    free = [group for group in core.groups.values() if group.actor_step is None]
    if keeps_order(settings):
        return _in_order(free, columns=columns, step=core.version, limit=min(core.slots_left(), most))
    if settings.spare_groups:
        free = [group for group in free if group.has_columns(columns)]
    last_chance = oldest_version(core.version, settings)
    return oldest_window_first(free, columns=columns, last_chance=last_chance, max_groups=most, slots=core.slots_left())


def choose_for_worker(
    groups: Iterable[OpenGroup], *, task: str, columns: tuple[str, ...], max_groups: int
) -> list[OpenGroup]:
    """Returns the ready groups that the task has neither processed nor leased, lowest index first."""
    chosen: list[OpenGroup] = []
    for group in groups:
        if len(chosen) == max_groups:
            break
        undone = group.actor_step is None and task not in group.done and task not in group.leases
        if undone and group.has_columns(columns):
            chosen.append(group)
    return chosen


def _in_order(free: list[OpenGroup], *, columns: tuple[str, ...], step: int, limit: int) -> list[OpenGroup]:
    """Returns groups strictly in order of issue.

    A group that is not ready blocks all later groups. Groups that were admitted for a later step are skipped.
    """
    chosen: list[OpenGroup] = []
    for group in free:
        if len(chosen) == limit:
            break
        if group.in_flight and group.admission.min_version > step:
            continue
        if not group.has_columns(columns):
            break
        chosen.append(group)
    return chosen


def oldest_window_first(
    free: list[OpenGroup], *, columns: tuple[str, ...], last_chance: int, max_groups: int, slots: int
) -> list[OpenGroup]:
    """Returns ready groups, lowest index first, and reserves slots for groups that leave the window after this step.

    The reserved slots are for groups with tokens of version ``last_chance`` or older. Newer groups get the remaining
    slots.
    """
    ready = [group for group in free if group.has_columns(columns)]
    reserved = sum(group.oldest_version <= last_chance for group in free)
    chosen: list[OpenGroup] = []
    for group in ready:
        if len(chosen) == max_groups or slots == 0:
            break
        if group.oldest_version <= last_chance:
            reserved -= 1
        elif slots <= reserved:
            continue
        chosen.append(group)
        slots -= 1
    return chosen


def is_stale(group: OpenGroup, settings: BusSettings, *, version: int) -> bool:
    """Returns whether a complete, unleased group has left the window of step ``version`` and must end."""
    if group.complete is None or group.actor_step is not None or settings.on_stale != "drop":
        return False
    return group.oldest_version < oldest_version(version, settings)


def is_surplus(group: OpenGroup, settings: BusSettings, *, version: int) -> bool:
    """Returns whether an unleased group is no longer needed at the start of step ``version``.

    With surplus=drop, a group in flight is needed until the step that it was admitted for. With surplus=keep, it
    continues. With on_stale=drop, a complete group is needed until its oldest trained token leaves the window; with
    on_stale=mask, until all its tokens have left the window.
    """
    if not settings.spare_groups:
        return False
    oldest = oldest_version(version, settings)
    if version >= settings.total_steps:
        return True
    if group.in_flight:
        return settings.surplus == "drop" and group.admission.min_version < oldest
    if settings.on_stale == "drop":
        return group.oldest_version < oldest
    return group.newest_version is not None and group.newest_version < oldest


def newest_version(columns: Mapping[str, bytes]) -> int | None:
    """Returns the weight version of a group's newest token; None if the columns do not contain the episodes."""
    if EPISODES not in columns:
        return None
    turns = [turn for episode in decode_episodes(columns[EPISODES]) for turn in episode.turns]
    return max(version for turn in turns for version, _ in turn.versions)


class StalenessCheck:
    """Detects episodes that are too old to be trained, by comparing with the newest weight version of all responses.

    An episode is too old if one of its tokens is more than ``max_lag`` versions older than the newest version. If
    ``max_lag`` is None, no episode is too old.
    """

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self._newest = 0
        self._told = False

    def sampled(self, version: int) -> None:
        """Records the weight version of a response."""
        self._newest = max(self._newest, version)

    def describe(self, uid: str, versions: Sequence[int]) -> str:
        """Returns why an episode is too old, or "". The first time, also logs how to avoid such episodes.

        ``versions`` has, for each turn of the episode, the weight version of the oldest token.
        """
        if self._max_lag is None or not versions or self._newest - min(versions) <= self._max_lag:
            return ""
        message = f"its first tokens have version {min(versions)}, and the weights have version {self._newest}"
        if not self._told:
            self._told = True
            log.warning(
                "episode %s ends after %d turns, because it is too old to be trained: %s. This warning appears once. "
                "Raise mode.max_staleness, use mode.on_stale=mask, or make episodes shorter.",
                uid,
                len(versions),
                message,
            )
        return message

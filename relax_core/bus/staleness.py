"""The staleness rule: which groups may enter the rollout, which a lease gets, and which have left the window.

Train step t consumes weights t and makes t + 1. It may train an episode iff t minus the version of its oldest trained
token is at most ``max_staleness``. Three places apply the rule, and all are here:

- admission lets a group enter only if some step inside the window can consume it;
- selection gives the actor first what leaves the window next;
- what left the window, or is not needed after over-sampling, ends as ``stale`` or ``over_sampled``.

With mode.on_stale=mask the actor leases such groups too, and `relax_core.train.micro_batches.decode_train_tree` masks
their tokens that are too old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from relax_core.bus.call_checks import ACTOR
from relax_core.bus.open_groups import OpenGroup
from relax_core.bus.settings import BusSettings
from relax_core.contracts.bus import LeaseRequest
from relax_core.contracts.columns import EPISODES, decode_episodes

if TYPE_CHECKING:
    from relax_core.bus.bus_state import BusCore

STALE = "stale"
OVER_SAMPLED = "over_sampled"


def admissible_versions(core: BusCore, max_groups: int) -> list[int]:
    """Returns the ``min_version`` of each group that may enter now, at most ``max_groups``."""
    settings = core.settings
    return plan_admissions(
        [group.ready_from(core.version) for group in core.groups.values() if group.actor_step != core.version],
        version=core.version,
        slots_left=core.slots_left(),
        groups_per_step=settings.groups_per_step,
        max_staleness=settings.max_staleness,
        total_steps=settings.total_steps,
        max_groups=max_groups,
        spare_groups=settings.spare_groups,
        surplus=settings.surplus,
    )


def plan_admissions(
    supply_versions: Iterable[int],
    *,
    version: int,
    slots_left: int,
    groups_per_step: int,
    max_staleness: int,
    total_steps: int,
    max_groups: int,
    spare_groups: int = 0,
    surplus: Literal["drop", "keep"] = "drop",
) -> list[int]:
    """Returns the ``min_version`` of each group that may enter now, at most ``max_groups``.

    ``supply_versions`` names, for every group that is not leased for step ``version``, the weight version from which on
    the group can be trained. A new group is meant for the first step c whose supply falls short, which means that fewer
    groups can be trained by step c than there are slots up to step c. The group enters if c is at most one step past
    the window and inside the run.

    If no group is lost, group k is meant for step k // groups_per_step. After a loss, a new group fills the missing
    slot first, because groups that the engine holds back for a later version cannot fill it.

    ``spare_groups`` are admitted beyond the slots: for each step anew if ``surplus`` is "drop", and once for the whole
    run if it is "keep", because an unused group then counts for the next step.
    """
    steps = window_steps(version, max_staleness=max_staleness, total_steps=total_steps)
    spares = [spare_groups if surplus == "keep" else spare_groups * (ahead + 1) for ahead in range(steps)]
    wanted = [slots_left + ahead * groups_per_step + spares[ahead] for ahead in range(steps)]
    return fill(wanted, supply_versions, version=version, max_staleness=max_staleness, max_groups=max_groups)


def window_steps(version: int, *, max_staleness: int, total_steps: int) -> int:
    """Returns how many steps, from step ``version`` on, groups may be admitted for."""
    return max(0, min(version + max_staleness + 1, total_steps - 1) - version + 1)


def fill(
    wanted: Sequence[int], supply_versions: Iterable[int], *, version: int, max_staleness: int, max_groups: int
) -> list[int]:
    """Returns the ``min_version`` of each new group, if ``wanted[k]`` groups are wanted up to step version + k."""
    # supply[k] counts the groups that can be trained from step version + k on.
    supply = [0] * len(wanted)
    for ready_from in supply_versions:
        if ready_from - version < len(wanted):
            supply[max(0, ready_from - version)] += 1
    admitted: list[int] = []
    groups_by_step = 0
    for ahead, count in enumerate(supply):
        groups_by_step += count
        while groups_by_step < wanted[ahead] and len(admitted) < max_groups:
            admitted.append(max(0, version + ahead - max_staleness))
            groups_by_step += 1
    return admitted


def choose(core: BusCore, request: LeaseRequest) -> list[OpenGroup]:
    """Returns the groups that a lease gets now; the actor's request is for the step that is due."""
    groups = core.groups.values()
    if request.task != ACTOR:
        return choose_for_worker(groups, task=request.task, columns=request.columns, max_groups=request.max_groups)
    return choose_for_actor(
        groups,
        columns=request.columns,
        step=core.version,
        max_staleness=core.settings.max_staleness,
        max_groups=request.max_groups,
        slots=core.slots_left(),
        over_sampled=core.settings.spare_groups > 0,
    )


def choose_for_worker(
    groups: Iterable[OpenGroup], *, task: str, columns: tuple[str, ...], max_groups: int
) -> list[OpenGroup]:
    """Returns the groups that the task has not worked on and does not hold, lowest index first."""
    chosen: list[OpenGroup] = []
    for group in groups:
        if len(chosen) == max_groups:
            break
        undone = group.actor_step is None and task not in group.done and task not in group.leases
        if undone and group.has_columns(columns):
            chosen.append(group)
    return chosen


def choose_for_actor(
    groups: Iterable[OpenGroup],
    *,
    columns: tuple[str, ...],
    step: int,
    max_staleness: int,
    max_groups: int,
    slots: int,
    over_sampled: bool = False,
) -> list[OpenGroup]:
    """Returns the groups that train step ``step`` gets now, at most ``slots`` and ``max_groups``.

    If ``over_sampled``, there are more groups than the step needs, and no group waits for one that is not ready.
    """
    free = [group for group in groups if group.actor_step is None]
    if over_sampled:
        free = [group for group in free if group.has_columns(columns)]
    elif max_staleness == 0:
        return _in_order(free, columns=columns, step=step, limit=min(slots, max_groups))
    return oldest_window_first(
        free, columns=columns, last_chance=step - max_staleness, max_groups=max_groups, slots=slots
    )


def _in_order(free: list[OpenGroup], *, columns: tuple[str, ...], step: int, limit: int) -> list[OpenGroup]:
    """Returns groups strictly in order of issue.

    A group that is not ready stops all groups behind it, unless it is admitted for a later step.
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
    """Returns groups lowest index first, and reserves slots for the groups that leave the window after this step.

    These are the groups of version ``last_chance`` and older. Groups that could wait get only the slots that the others
    do not need.
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
    """Returns whether a complete group that no step holds has left the window of step ``version``, and must end."""
    if group.complete is None or group.actor_step is not None or settings.on_stale != "drop":
        return False
    return group.oldest_version < version - settings.max_staleness


def is_surplus(group: OpenGroup, settings: BusSettings, *, version: int) -> bool:
    """Returns whether a group that no lease holds is not needed any more at the begin of step ``version``.

    With surplus=drop, a group in flight is not needed once the step that it was admitted for is over; with surplus=keep
    it goes on. A complete group is not needed once none of its tokens is inside the window; on_stale=drop ends it
    earlier.
    """
    if not settings.spare_groups:
        return False
    oldest = version - settings.max_staleness
    if version >= settings.total_steps:
        return True
    if group.in_flight:
        return settings.surplus == "drop" and group.admission.min_version < oldest
    if settings.on_stale == "drop":
        return group.oldest_version < oldest
    return group.newest_version is not None and group.newest_version < oldest


def newest_version(columns: Mapping[str, bytes]) -> int | None:
    """Returns the version of a group's newest token; None if the columns do not contain the episodes."""
    if EPISODES not in columns:
        return None
    turns = [turn for one in decode_episodes(columns[EPISODES]) for turn in one.turns]
    return max(version for turn in turns for version, _ in turn.versions)

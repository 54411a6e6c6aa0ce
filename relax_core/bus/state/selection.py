"""Selects the ready groups that a lease gets. The argument ``groups`` is always in order of issue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relax_core.bus.state.call_checks import ACTOR
from relax_core.bus.state.open_groups import OpenGroup
from relax_core.contracts.bus import LeaseRequest

if TYPE_CHECKING:
    from relax_core.bus.state.bus_state import BusCore


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

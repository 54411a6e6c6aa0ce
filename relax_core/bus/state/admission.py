"""Decides how many prompt groups may enter the rollout, and from which weight version on each may start.

A group enters only if some train step inside the staleness window can consume it (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from relax_core.bus.state.bus_state import BusCore


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

"""Which train step a new prompt group is for, and with which weights it may start (DESIGN §5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal


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

    ``supply_versions``: of every group that is not yet leased for step ``version``, the weight version from which on
    it can be trained. A new group goes to the first step c for which the supply falls short: fewer groups that can be
    trained by step c than slots up to it. It enters iff c is at most one step past the window, and within the run.

    Without losses this is place // groups_per_step. After a loss the hole is filled first: groups that the engine holds
    back for a later version cannot fill it.

    ``spare_groups`` are let in beyond the slots: for each step anew where its ``surplus`` is dropped, once where it is
    kept and counts for the next step.
    """
    last_step = min(version + max_staleness + 1, total_steps - 1)
    if last_step < version:
        return []
    # supply[k]: groups that can be trained by step version + k and not before.
    supply = [0] * (last_step - version + 1)
    for ready_from in supply_versions:
        if ready_from <= last_step:
            supply[max(0, ready_from - version)] += 1
    admitted: list[int] = []
    groups_by_step = 0
    for ahead, count in enumerate(supply):
        groups_by_step += count
        spares = spare_groups if surplus == "keep" else spare_groups * (ahead + 1)
        wanted = slots_left + ahead * groups_per_step + spares
        while groups_by_step < wanted and len(admitted) < max_groups:
            admitted.append(max(0, version + ahead - max_staleness))
            groups_by_step += 1
    return admitted

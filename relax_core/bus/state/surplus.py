"""Over-sampling: finds the groups that a finished train step did not need and no later step may train."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.bus.state.open_groups import OpenGroup
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.columns import EPISODES, decode_episodes

OVER_SAMPLED = "over_sampled"


class RetiredGroups:
    """Holds the groups that ended in flight because no step needs them, until their rollout worker asks."""

    def __init__(self) -> None:
        self._retired: list[tuple[int, OpenGroup]] = []  # with the version whose begin ended the group

    def add(self, version: int, group: OpenGroup) -> None:
        """Adds a group that ended when ``version`` came into force."""
        self._retired.append((version, group))

    def since(self, version: int, *, worker: int) -> list[str]:
        """Returns the uids of the worker's groups that ended after ``version``, and forgets the worker's older ones.

        A worker that has exited gets no new groups, so what it leaves here stays small.
        """
        self._retired = [one for one in self._retired if one[0] > version or one[1].worker != worker]
        return [group.admission.group_uid for _, group in self._retired if group.worker == worker]

    def clear(self) -> None:
        """Forgets all groups."""
        self._retired.clear()


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

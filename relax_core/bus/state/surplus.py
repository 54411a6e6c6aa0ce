"""Over-sampling: which groups a train step that has ended left over, and no later one may train."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.bus.state.open_groups import OpenGroup
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.columns import EPISODES, decode_episodes

OVER_SAMPLED = "over_sampled"


class RetiredGroups:
    """Groups that ended in flight because the steps do not need them, as news for the rollout worker that has each."""

    def __init__(self) -> None:
        self._news: list[tuple[int, OpenGroup]] = []  # with the version at whose begin it ended

    def add(self, version: int, group: OpenGroup) -> None:
        self._news.append((version, group))

    def since(self, version: int, *, worker: int) -> list[str]:
        """The worker's groups that ended after ``version``. Forgets its older ones; a worker that is gone gets no
        groups either, so its news stay few."""
        self._news = [one for one in self._news if one[0] > version or one[1].worker != worker]
        return [group.admission.group_uid for _, group in self._news if group.worker == worker]

    def clear(self) -> None:
        self._news.clear()


def is_surplus(group: OpenGroup, settings: BusSettings, *, version: int) -> bool:
    """Whether a group that no lease holds is over at the begin of step ``version``.

    With surplus=drop a group in flight is, once the step that it was admitted for has passed; with surplus=keep it goes
    on. A complete one is, once nothing of it is inside of the window; on_stale=drop ends it earlier.
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
    """The version of a row's newest token; None where the columns do not tell."""
    if EPISODES not in columns:
        return None
    turns = [turn for one in decode_episodes(columns[EPISODES]) for turn in one.turns]
    return max(version for turn in turns for version, _ in turn.versions)

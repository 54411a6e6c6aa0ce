"""Over-sampling: which groups a train step that has ended left over, and no later one may train."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.bus.groups import OpenGroup
from relax_core.bus.settings import BusSettings
from relax_core.contracts.columns import EPISODES, decode_episodes

OVER_SAMPLED = "over_sampled"


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

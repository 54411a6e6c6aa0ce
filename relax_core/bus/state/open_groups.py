"""The state of one group from its admission to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from relax_core.contracts.bus import Admission, Group


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """Is an admitted group that has no end yet.

    ``complete`` is None until the rollout puts the complete group. ``worker`` is the rollout worker to which it was
    admitted. ``done`` holds the tasks that have written their columns. ``leases`` maps each task to its lease id.
    ``actor_step`` is the train step whose lease holds the group. ``deliveries`` counts how often the actor leased it.
    ``newest_version`` is the version of its newest token, if its columns contain the episodes. ``modality`` is that of
    its prompt, empty in a run on text and before the prompt's data row is read.
    """

    admission: Admission
    uids: tuple[str, ...]
    admitted_at: float
    worker: int
    complete: Group | None = None
    done: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    actor_step: int | None = None
    deliveries: int = 0
    newest_version: int | None = None
    modality: str = ""

    @property
    def in_flight(self) -> bool:
        """Is True until the rollout puts the complete group."""
        return self.complete is None

    def ready_from(self, version: int) -> int:
        """Returns the weight version from which on the group can be trained; ``version`` is in force."""
        return self.admission.min_version if self.in_flight else version

    @property
    def oldest_version(self) -> int:
        """Returns the version of the oldest trained token; in flight, the oldest that it may have."""
        return self.admission.min_version if self.complete is None else min(self.complete.versions)

    def has_columns(self, columns: Iterable[str]) -> bool:
        """Returns whether the group is complete and has all these columns."""
        return self.complete is not None and all(column in self.complete.columns for column in columns)

    def leased_group(self, columns: Iterable[str]) -> Group:
        """Returns the group with these columns for a lease. Raises ValueError for a column that it lacks."""
        group = self.complete
        assert group is not None, "only complete groups are leased"
        try:
            asked = {column: group.columns[column] for column in columns}
        except KeyError as lacking:
            there = ", ".join(group.columns)
            raise ValueError(
                f"bus: group {group.group_uid} has no column {lacking}: ask for one of {there}"
            ) from lacking
        return msgspec.structs.replace(group, columns=asked, dropped={}, media={}, modality=self.modality)

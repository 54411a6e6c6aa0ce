"""The bus's view of one group from its admission to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_core.contracts.bus import Admission, GroupRow, LeasedRow


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """An admitted group that has no end yet. ``row`` is None until rollout puts it.

    ``worker``: the rollout worker to which it was admitted. ``done``: tasks that worked on it. ``leases``: task → lease
    id. ``actor_step``: the train step whose lease holds it. ``deliveries``: how often the actor got it.
    ``newest_version``: of the row's newest token, where its columns tell.
    """

    admission: Admission
    uids: tuple[str, ...]
    admitted_at: float
    worker: int
    row: GroupRow | None = None
    done: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    actor_step: int | None = None
    deliveries: int = 0
    newest_version: int | None = None

    @property
    def in_flight(self) -> bool:
        return self.row is None

    @property
    def oldest_version(self) -> int:
        """Version of the oldest trained token; before the row is here, the oldest that it can be."""
        return self.admission.min_version if self.row is None else min(self.row.versions)

    def has_columns(self, columns: Iterable[str]) -> bool:
        return self.row is not None and all(column in self.row.columns for column in columns)

    def leased_row(self, columns: Iterable[str]) -> LeasedRow:
        """The row as a task sees it. Raises ValueError for a column that it lacks."""
        row = self.row
        assert row is not None, "only rows that are here are leased"
        try:
            asked = {column: row.columns[column] for column in columns}
        except KeyError as lacking:
            there = ", ".join(row.columns)
            raise ValueError(f"bus: row {row.group_uid} has no column {lacking}: ask for one of {there}") from lacking
        return LeasedRow(group_uid=row.group_uid, index=row.index, uids=row.uids, versions=row.versions, columns=asked)

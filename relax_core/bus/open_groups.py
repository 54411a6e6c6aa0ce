"""The records of the groups without an end, and of the leases that are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from relax_core.bus.call_checks import ACTOR
from relax_core.contracts.bus import Admission, Group, LeaseLost, LeaseRequest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """Is a lease that is held. ``step`` is set for the task "actor" only; times are seconds of the core's clock."""

    lease_id: int
    task: str
    step: int | None
    group_uids: list[str]
    leased_at: float
    expires_at: float


class LeaseTable:
    """Holds all leases in the order in which they were given. A lease id is never used twice.

    The caller changes the groups of a lease itself.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[int, HeldLease] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._held

    def open(self, request: LeaseRequest, group_uids: Sequence[str]) -> HeldLease:
        """Adds a new lease of these groups and returns it."""
        now = self._clock()
        lease = HeldLease(
            lease_id=self._next_id,
            task=request.task,
            step=request.step if request.task == ACTOR else None,
            group_uids=list(group_uids),
            leased_at=now,
            expires_at=now + request.lease_s,
        )
        self._next_id += 1
        self._held[lease.lease_id] = lease
        return lease

    def held(self, lease_id: int) -> HeldLease:
        """Returns a lease. Raises `LeaseLost` if it is not held."""
        lease = self._held.get(lease_id)
        if lease is None:
            raise LeaseLost(
                f"lease {lease_id} is not held: it expired, was released or revoked, or the bus was restored; "
                "its groups went back and another worker may have them"
            )
        return lease

    def of_step(self, lease_ids: Iterable[int], step: int) -> list[HeldLease]:
        """Returns the actor's leases of these ids, each once. Raises ValueError for a lease of another step or task."""
        leases = [self.held(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        for lease in leases:
            if lease.step != step:
                what = f"was given for step {lease.step}" if lease.task == ACTOR else f"belongs to task {lease.task}"
                raise ValueError(f"bus: ack of step {step} names lease {lease.lease_id}, which {what}")
        return leases

    def of_task(self, task: str) -> list[HeldLease]:
        """Returns the leases of a task."""
        return [lease for lease in self._held.values() if lease.task == task]

    def overdue(self) -> list[HeldLease]:
        """Returns the leases whose time is over."""
        now = self._clock()
        return [lease for lease in self._held.values() if lease.expires_at <= now]

    def next_expiry(self) -> float | None:
        """Returns when the next lease runs out, in seconds of the core's clock; None if no lease is held."""
        return min((lease.expires_at for lease in self._held.values()), default=None)

    def remove(self, lease_id: int) -> HeldLease:
        """Removes a lease and returns it."""
        return self._held.pop(lease_id)

    def clear(self) -> None:
        """Removes all leases."""
        self._held.clear()

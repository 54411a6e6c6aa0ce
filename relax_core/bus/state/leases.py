"""Records the leases that are held: by which task, for which train step, until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from relax_core.bus.state.call_checks import ACTOR
from relax_core.contracts.bus import LeaseLost, LeaseRequest


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

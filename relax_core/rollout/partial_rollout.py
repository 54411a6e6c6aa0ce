"""Partial rollouts: decides which groups in flight continue under new weights and which groups are cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relax_core.contracts.bus import Admission, VersionChange
from relax_core.contracts.tree import group_uid

MAX_ABORTS = 3  # with rollout.partial=abort, a group that was aborted this often finishes in place


class VersionBus(Protocol):
    """Declares the bus call that the weight-update handler makes."""

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Waits for a version after ``since_version``, or for groups of ``worker`` that the bus has ended."""


class AbortingPool(Protocol):
    """Declares the calls of the engine pool that the weight-update handler makes."""

    async def abort(self, rids: Iterable[str], *, min_version: int) -> None:
        """Aborts these requests; each continues from its prefix with weights ``min_version`` or newer."""

    async def cancel(self, rids: Iterable[str]) -> None:
        """Ends these requests for good."""


@dataclass(slots=True)
class _GroupInFlight:
    min_version: int  # the oldest weight version that its newest request may start with
    rids: set[str] = field(default_factory=set)  # its requests in flight
    cancel: Callable[[], object] | None = None  # ends its episodes
    aborts: int = 0


class GroupsInFlight:
    """Receives the players' reports of groups in flight, and ends none of them.

    `WeightUpdateHandler` ends or restarts groups.
    """

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Adds the groups of these admissions; some of them may end before they begin."""

    def begin(self, index: int, cancel: Callable[[], object] | None = None) -> bool:
        """Reports the start of a group, whose episodes ``cancel`` ends; returns False if the group has ended."""
        return True

    def add_request(self, index: int, rid: str) -> None:
        """Adds a request of a group that is about to be sent."""

    def remove_request(self, index: int, rid: str) -> None:
        """Removes a request whose response has arrived."""

    def end(self, index: int) -> None:
        """Removes a group whose responses are complete or whose data row cannot be used."""


class WeightUpdateHandler(GroupsInFlight):
    """Follows the weight versions for rollout worker ``worker``, whose loop reports its groups in flight.

    Groups that the bus has ended (over-sampling) are cancelled. With ``max_aborts`` above 0 (rollout.partial=abort)
    all other groups are aborted at each new version, so that they continue from their prefixes with its weights. A
    group that was aborted ``max_aborts`` times is left to finish.
    """

    def __init__(
        self, bus: VersionBus, pool: AbortingPool, *, max_aborts: int, call_timeout_s: float, worker: int = 0
    ) -> None:
        self._bus = bus
        self._pool = pool
        self._max_aborts = max_aborts
        self._call_timeout_s = call_timeout_s
        self._worker = worker
        self._in_flight: dict[str, _GroupInFlight] = {}  # by group uid
        self.aborts = 0

    def admit(self, admissions: Sequence[Admission]) -> None:  # noqa: D102
        for admission in admissions:
            self._in_flight[admission.group_uid] = _GroupInFlight(admission.min_version)

    def begin(self, index: int, cancel: Callable[[], object] | None = None) -> bool:  # noqa: D102
        group = self._in_flight.get(group_uid(index))
        if group is None:
            return False
        group.cancel = cancel
        return True

    def add_request(self, index: int, rid: str) -> None:  # noqa: D102
        if (group := self._in_flight.get(group_uid(index))) is not None:  # a cancelled group has no entry
            group.rids.add(rid)

    def remove_request(self, index: int, rid: str) -> None:  # noqa: D102
        if (group := self._in_flight.get(group_uid(index))) is not None:
            group.rids.discard(rid)

    def end(self, index: int) -> None:  # noqa: D102
        self._in_flight.pop(group_uid(index), None)

    async def run(self) -> None:
        """Runs until the bus closes (BusClosed)."""
        change = await self._next_change(-1)
        await self._give_up(change.retired)  # nothing is aborted, because all groups in flight have these weights
        while True:
            version = change.version
            change = await self._next_change(version)
            if change.version != version:
                await self._give_up(change.retired)
                await self._continue_with(change)

    async def _next_change(self, since_version: int) -> VersionChange:
        return await self._bus.wait_version(since_version, worker=self._worker, timeout_s=self._call_timeout_s)

    async def _give_up(self, retired: Sequence[str]) -> None:
        ended = [self._in_flight.pop(uid) for uid in retired if uid in self._in_flight]
        for group in ended:
            if group.cancel is not None:
                group.cancel()
        rids = [rid for group in ended for rid in sorted(group.rids)]
        if rids:
            await self._pool.cancel(rids)

    async def _continue_with(self, change: VersionChange) -> None:
        aborted = []
        for group in self._in_flight.values():
            if group.rids and group.min_version < change.version and group.aborts < self._max_aborts:
                group.min_version = change.version
                group.aborts += 1
                self.aborts += 1
                aborted += sorted(group.rids)
        if aborted:
            await self._pool.abort(aborted, min_version=change.version)

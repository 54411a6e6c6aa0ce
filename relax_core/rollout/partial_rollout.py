"""Handles weight updates: decides which groups in flight continue with new weights, and which are cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relax_core.contracts.bus import Admission, VersionChange
from relax_core.contracts.tree import group_uid

MAX_ABORTS = 3  # with rollout.partial=abort, a group is aborted at most this often


class VersionBus(Protocol):
    """Declares the bus call that the weight-update handler makes."""

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Waits for a version after ``since_version``; returns it with the groups of ``worker`` that the bus ended."""


class AbortingPool(Protocol):
    """Declares the calls of the engine pool that the weight-update handler makes."""

    async def abort(self, rids: Iterable[str], *, min_version: int) -> None:
        """Aborts these requests; each request continues from its prefix with weights ``min_version`` or newer."""

    async def cancel(self, rids: Iterable[str]) -> None:
        """Ends these requests; they do not continue."""


@dataclass(slots=True)
class _GroupInFlight:
    min_version: int  # the oldest weight version that the group's newest request may start with
    rids: set[str] = field(default_factory=set)  # requests in flight of the group
    cancel: Callable[[], object] | None = None  # ends the group's episodes
    aborts: int = 0


class GroupsInFlight:
    """Receives the players' reports of groups in flight, and ignores them.

    The subclass `WeightUpdateHandler` cancels or aborts groups.
    """

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Adds the groups of these admissions; a group may end before it begins."""

    def begin(self, index: int, cancel: Callable[[], object] | None = None) -> bool:
        """Reports the start of a group; returns False if the group has ended. ``cancel`` ends the group's episodes."""
        return True

    def add_request(self, index: int, rid: str) -> None:
        """Adds a request of a group before it is sent."""

    def remove_request(self, index: int, rid: str) -> None:
        """Removes a request after its response has arrived."""

    def end(self, index: int) -> None:
        """Removes a group with complete responses, or with a data row that cannot be used."""


class WeightUpdateHandler(GroupsInFlight):
    """Cancels and aborts groups in flight of rollout worker ``worker`` at new weight versions.

    At each new version, groups that the bus has ended (over-sampling) are cancelled. With ``max_aborts`` above 0
    (rollout.partial=abort) the requests of all other groups are aborted, and continue from their prefixes with the new
    weights. A group that was aborted ``max_aborts`` times is not aborted again.
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
        """Runs until the bus closes (raises BusClosed)."""
        change = await self._next_change(-1)
        await self._give_up(change.retired)  # aborts nothing: all groups in flight have these weights
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

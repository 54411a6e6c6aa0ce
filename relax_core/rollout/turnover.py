"""What happens to the groups under way when new weights are in force: some go on anew, some are given up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from relax_core.contracts.bus import VersionChange
from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.sample import group_uid


class VersionBus(Protocol):
    """The bus as this task uses it."""

    async def wait_version_async(self, since_version: int, *, timeout_s: float) -> VersionChange: ...


class AbortingPool(Protocol):
    """The engines as this task uses them."""

    async def abort(self, rids: Iterable[str], *, min_version: int) -> None: ...

    async def cancel(self, rids: Iterable[str]) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    rid: str
    begun_at: int  # the oldest weights that its newest request may be started with
    aborts: int = 0


class Turnover:
    """Follows the weight versions for a sampler, which says what is under way.

    Groups that the bus has ended (over-sampling) are cancelled. With ``max_aborts`` above 0 (rollout.partial=abort) the
    others are aborted at each new version, so that they go on from their prefixes with its weights; a group that was
    aborted ``max_aborts`` times is left to finish.
    """

    def __init__(self, bus: VersionBus, pool: AbortingPool, *, max_aborts: int, call_timeout_s: float) -> None:
        self._bus = bus
        self._pool = pool
        self._max_aborts = max_aborts
        self._call_timeout_s = call_timeout_s
        self._under_way: dict[str, _UnderWay] = {}  # by group uid
        self.aborts = 0

    def began(self, index: int, request: PromptRequest) -> None:
        self._under_way[group_uid(index)] = _UnderWay(request.rid, request.min_version)

    def ended(self, index: int) -> None:
        self._under_way.pop(group_uid(index), None)

    async def run(self) -> None:
        """Until the bus closes (BusClosed)."""
        version = -1
        while True:
            change = await self._bus.wait_version_async(version, timeout_s=self._call_timeout_s)
            if change.version != version:
                version = change.version
                await self._turn(change)

    async def _turn(self, change: VersionChange) -> None:
        retired = [self._under_way.pop(uid).rid for uid in change.retired if uid in self._under_way]
        if retired:
            await self._pool.cancel(retired)
        aborted = []
        for group in self._under_way.values():
            if group.begun_at < change.version and group.aborts < self._max_aborts:
                group.begun_at = change.version
                group.aborts += 1
                aborted.append(group.rid)
        if aborted:
            self.aborts += len(aborted)
            await self._pool.abort(aborted, min_version=change.version)

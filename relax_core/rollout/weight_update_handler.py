"""What happens to the groups under way when new weights are in force: some go on anew, some are given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relax_core.contracts.bus import Admission, VersionChange
from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.tree import group_uid


class VersionBus(Protocol):
    """The bus as this task uses it."""

    async def wait_version_async(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange: ...


class AbortingPool(Protocol):
    """The engines as this task uses them."""

    async def abort(self, rids: Iterable[str], *, min_version: int) -> None: ...

    async def cancel(self, rids: Iterable[str]) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    begun_at: int  # the oldest weights that its newest request may be started with
    rids: set[str] = field(default_factory=set)  # of its requests that are under way
    cancel: Callable[[], object] | None = None  # ends what goes on beside the requests
    aborts: int = 0


class WeightUpdateHandler:
    """Follows the weight versions for the sampler of rollout worker ``worker``, which says what is under way.

    Groups that the bus has ended (over-sampling) are cancelled. With ``max_aborts`` above 0 (rollout.partial=abort) the
    others are aborted at each new version, so that they go on from their prefixes with its weights; a group that was
    aborted ``max_aborts`` times is left to finish.
    """

    def __init__(
        self, bus: VersionBus, pool: AbortingPool, *, max_aborts: int, call_timeout_s: float, worker: int = 0
    ) -> None:
        self._bus = bus
        self._pool = pool
        self._max_aborts = max_aborts
        self._call_timeout_s = call_timeout_s
        self._worker = worker
        self._under_way: dict[str, _UnderWay] = {}  # by group uid
        self.aborts = 0

    def admitted(self, admissions: Sequence[Admission]) -> None:
        """These are ours from now on; some of them may be over before they begin."""
        for admission in admissions:
            self._under_way[admission.group_uid] = _UnderWay(admission.min_version)

    def began(self, index: int, request: PromptRequest) -> bool:
        """Its request is about to go out. Returns whether it is still wanted."""
        group = self._under_way.get(group_uid(index))
        if group is None:
            return False
        group.rids.add(request.rid)
        return True

    def began_episodes(self, index: int, cancel: Callable[[], object]) -> bool:
        """Its episodes are about to begin; ``cancel`` ends them. Returns whether the group is still wanted."""
        group = self._under_way.get(group_uid(index))
        if group is None:
            return False
        group.cancel = cancel
        return True

    def asks(self, index: int, rid: str) -> None:
        """A turn's request is about to go out."""
        if (group := self._under_way.get(group_uid(index))) is not None:  # else it is being given up
            group.rids.add(rid)

    def asked(self, index: int, rid: str) -> None:
        """A turn's response is in."""
        if (group := self._under_way.get(group_uid(index))) is not None:
            group.rids.discard(rid)

    def ended(self, index: int) -> None:
        self._under_way.pop(group_uid(index), None)

    async def run(self) -> None:
        """Until the bus closes (BusClosed)."""
        change = await self._next_change(-1)
        await self._give_up(change.retired)  # nothing is aborted: whatever is under way began with these weights
        while True:
            version = change.version
            change = await self._next_change(version)
            if change.version != version:
                await self._give_up(change.retired)
                await self._go_on_anew(change)

    async def _next_change(self, since_version: int) -> VersionChange:
        return await self._bus.wait_version_async(since_version, worker=self._worker, timeout_s=self._call_timeout_s)

    async def _give_up(self, retired: Sequence[str]) -> None:
        ended = [self._under_way.pop(uid) for uid in retired if uid in self._under_way]
        for group in ended:
            if group.cancel is not None:
                group.cancel()
        rids = [rid for group in ended for rid in sorted(group.rids)]
        if rids:
            await self._pool.cancel(rids)

    async def _go_on_anew(self, change: VersionChange) -> None:
        aborted = []
        for group in self._under_way.values():
            if group.rids and group.begun_at < change.version and group.aborts < self._max_aborts:
                group.begun_at = change.version
                group.aborts += 1
                self.aborts += 1
                aborted += sorted(group.rids)
        if aborted:
            await self._pool.abort(aborted, min_version=change.version)

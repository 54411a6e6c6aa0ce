"""The bus process: `BusCore` behind one asynchronous Ray actor.

It imports no torch and holds the run's groups and ledger.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import ray

from relax_core.bus.journal import Journal
from relax_core.bus.ledger import Ledger
from relax_core.bus.media_storage import LocalFolder, MediaFiles, MediaNodes
from relax_core.bus.ray_bus import (
    ERRORS,
    Block,
    BlockLocations,
    PutMessage,
    Reply,
    WriteMessage,
    encode,
)
from relax_core.bus.replay_buffer import BusCore
from relax_core.bus.settings import BusSettings
from relax_core.bus.waiting_calls import (
    ROLLOUT,
    WaitingCalls,
    admit_owed_by,
    explain_admit,
    explain_lease,
    lease_owed_by,
)
from relax_core.contracts.bus import (
    BusLost,
    BusProgress,
    BusTimeout,
    Group,
    Lease,
    LeaseLost,
    LeaseRequest,
    VersionChange,
)

Answer = bytes | tuple[Any, ...]  # the bytes of a Reply, with the object refs of its blocks if it has any

_groups_decoder = msgspec.msgpack.Decoder(PutMessage)
_request_decoder = msgspec.msgpack.Decoder(LeaseRequest)
_columns_decoder = msgspec.msgpack.Decoder(WriteMessage)


@dataclass(frozen=True, slots=True)
class _StoredPayload:
    """A large payload in Ray's object store: one array in a block that this process put."""

    block: ray.ObjectRef
    position: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def answers(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Answer]]:
    """Returns the method's value, or one of the contract's errors, as a `Reply`."""

    @functools.wraps(method)
    async def answer(self: BusActor, *args: Any) -> Answer:
        try:
            if self._lost is not None:
                raise self._lost
            value = await method(self, *args)
        except tuple(ERRORS.values()) as error:
            name = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
            return encode(Reply(name, str(error), msgspec.Raw(encode(None))))
        finally:
            self.remove_unnamed_media()
        blocks: tuple[Any, ...] = ()
        if isinstance(value, Lease):
            value, blocks = self.pack_lease(value)
        reply = encode(Reply("", "", msgspec.Raw(encode(value))))
        return (reply, *blocks) if blocks else reply

    return answer


class BusActor:
    """Declares the bus process. Its methods take msgpack bodies and deadlines in seconds; `RayBus` describes them."""

    def __init__(self, settings: bytes, ledger_path: str) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=BusSettings)
        self._journal = Journal(Path(ledger_path))
        ledger = Ledger(group_size=self._settings.group_size, journal=self._journal)
        self._core = BusCore(self._settings, ledger=ledger, clock=time.monotonic)
        self._waiting = WaitingCalls()
        self._expiry: asyncio.TimerHandle | None = None
        self._media = self._stored_media()
        self._lost: BusLost | None = None  # set by a backend whose payloads are stored in other processes

    # -- calls of the rollout ------------------------------------------------------------------------------------
    @answers
    async def admit(self, max_groups: int, worker: int, timeout_s: float) -> Any:
        """Waits for admissions."""
        return await self._waiting.wait(
            lambda: self._core.admit(max_groups, worker=worker) or None,
            explain=lambda waited_s: explain_admit(self._core, worker, waited_s=waited_s),
            timeout_s=timeout_s,
            owed_by=lambda: admit_owed_by(self._core, worker),
            task=ROLLOUT,
            worker=worker,
        )

    @answers
    async def reclaim(self, worker: int) -> Any:
        """Returns the worker's admissions that are in flight, and ends the waits of its earlier process."""
        reclaimed = self._core.reclaim(worker=worker)
        # Ray does not cancel the call of a killed process. It would take credits that no process uses.
        lost = LeaseLost(f"the admissions of an earlier process of {ROLLOUT}-{worker} were reclaimed")
        self._waiting.fail_task(ROLLOUT, lost, worker=worker)
        return reclaimed

    @answers
    async def put(self, body: bytes, blocks: list[Block]) -> None:
        """Enters complete groups and puts the large payloads of accepted groups into the object store."""
        given = _groups_decoder.decode(body)
        self._core.check_groups([_with_payloads(group, _sized(large, blocks)) for group, large in given])
        accepted = [(group, large) for group, large in given if self._core.accepts(group.group_uid)]
        refs = [ray.put(block) for block in blocks] if accepted else []
        self._core.put([_with_payloads(group, _stored(large, blocks, refs)) for group, large in accepted])
        self._changed()

    @answers
    async def drop(self, group_uid: str, reason: str) -> None:
        self._core.drop(group_uid, reason=reason)
        self._changed()

    @answers
    async def name_modalities(self, modalities: dict[int, str]) -> None:
        self._core.name_modalities(modalities)

    @answers
    async def wait_version(self, since_version: int, worker: int, timeout_s: float) -> Any:
        """Waits for another version. After ``timeout_s`` it returns the old version without groups."""
        try:
            return await self._waiting.wait(
                lambda: self._core.version_change(since_version, worker=worker),
                explain=lambda _: "",
                timeout_s=timeout_s,
            )
        except BusTimeout:
            return VersionChange(version=since_version, retired=[])

    # -- media items ----------------------------------------------------------------------------------------------
    @answers
    async def hold(self, items: dict[str, int], worker: int, node_id: str) -> Any:
        """Names items for a rollout worker and returns the digests of those that are not stored on its node."""
        media = self._require_media()
        self._core.hold(items, worker=worker)
        if isinstance(media, MediaNodes):
            return await media.missing(list(items), node_id=node_id)
        media.keep_sweeping(self._core.media)
        return await media.missing(list(items))

    @answers
    async def let_go(self, digests: list[str], worker: int) -> None:
        self._core.let_go(digests, worker=worker)

    @answers
    async def open_media(self, node_id: str) -> None:
        await self._media_nodes().open(node_id)

    @answers
    async def bring_media(self, digests: list[str], node_id: str, timeout_s: float) -> None:
        await self._media_nodes().bring(digests, node_id=node_id, timeout_s=timeout_s)

    def _stored_media(self) -> MediaFiles | MediaNodes | None:
        folder = Path(self._settings.media_folder)
        if not self._settings.media_folder:
            return None
        return MediaNodes(folder, self._core.media) if self._settings.media_nodes else MediaFiles(LocalFolder(folder))

    def _media_nodes(self) -> MediaNodes:
        media = self._require_media()
        assert isinstance(media, MediaNodes), "only a client of such a bus calls it"
        return media

    def _require_media(self) -> MediaFiles | MediaNodes:
        if self._media is None:
            raise ValueError("bus: this run has no media: its model has no tower, or it runs with modality=text")
        return self._media

    def remove_unnamed_media(self) -> None:
        """Begins to remove the tensors of the items that nobody names any more."""
        unnamed = self._core.media.take_unnamed()
        if unnamed and self._media is not None:
            self._media.remove(unnamed)

    # -- calls of workers that lease ------------------------------------------------------------------------------
    @answers
    async def lease(self, request: bytes, timeout_s: float) -> Any:
        return await self._lease(request, timeout_s)

    @answers
    async def read(self, lease_id: int, group_uids: list[str], columns: list[str]) -> Any:
        return self._core.read(lease_id, group_uids, columns)

    @answers
    async def write(self, lease_id: int, body: bytes, blocks: list[Block], then: bytes | None, timeout_s: float) -> Any:
        """Adds columns to a lease's groups, ends the lease and waits for the next one if ``then`` asks for one."""
        written = _columns_decoder.decode(body)
        refs = [ray.put(block) for block in blocks]
        columns = {uid: {**small, **_stored(large, blocks, refs)} for uid, (small, large) in written.items()}
        self._core.write(lease_id, cast(Mapping[str, Mapping[str, bytes]], columns))
        self._changed()
        return (
            await self._lease(then, timeout_s, after=f"the write of lease {lease_id} is recorded; ") if then else None
        )

    @answers
    async def ack(
        self, lease_ids: list[int], step: int, dropped: dict[str, str], then: bytes | None, timeout_s: float
    ) -> Any:
        """Records a train step and waits for the next lease if ``then`` asks for one."""
        self._core.ack(lease_ids, step=step, dropped=dropped)
        self._changed()
        return await self._lease(then, timeout_s, after=f"the ack of step {step} is recorded; ") if then else None

    @answers
    async def release(self, lease_ids: list[int]) -> None:
        self._core.release(lease_ids)
        self._changed()

    @answers
    async def revoke(self, task: str) -> None:
        self._core.revoke(task)
        self._waiting.fail_task(task, LeaseLost(f"the leases of task {task} were revoked"))
        self._changed()

    async def _lease(self, request_body: bytes, timeout_s: float, *, after: str = "") -> Lease:
        request = _request_decoder.decode(request_body)
        lease = self._core.lease(request)
        if lease is None:
            since = self._core.clock()
            lease = await self._waiting.wait(
                lambda: self._core.lease(request),
                explain=lambda waited_s: after + explain_lease(self._core, request, waited_s=waited_s),
                timeout_s=timeout_s,
                owed_by=lambda: lease_owed_by(self._core, request),
                task=request.task,
            )
            lease = msgspec.structs.replace(lease, waited_s=self._core.clock() - since)
        self._arm_expiry()
        return lease

    # -- calls of the controller ---------------------------------------------------------------------------------
    @answers
    async def progress(self) -> Any:
        return self._core.progress()

    @answers
    async def waits(self) -> Any:
        return self._waiting.waits()

    @answers
    async def wait_progress(self, since_version: int, timeout_s: float) -> Any:
        """Waits until the version changes or the bus is closed, at most ``timeout_s``, and returns the counts."""

        def attempt() -> BusProgress | None:
            moved = self._core.version != since_version or self._core.closed_because is not None
            return self._core.progress() if moved else None

        try:
            return await self._waiting.wait(attempt, explain=lambda _: "", timeout_s=timeout_s)
        except BusTimeout:
            return self._core.progress()

    @answers
    async def snapshot(self, timeout_s: float) -> Any:
        """Returns the state for a checkpoint once the ledger's events are on disk."""
        snapshot = self._core.snapshot()
        await asyncio.to_thread(self._journal.flush, timeout_s=timeout_s)
        return snapshot

    @answers
    async def restore(self, snapshot: bytes) -> None:
        self._core.restore(snapshot)
        self._changed()

    @answers
    async def close(self, reason: str, timeout_s: float) -> None:
        """Closes the bus and writes the remaining events of the ledger."""
        self._core.close(reason=reason)
        self._changed()
        await asyncio.to_thread(self._journal.close, timeout_s=timeout_s)

    async def describe(self) -> tuple[int, bytes, bytes]:
        """Returns (process id, settings, location of the payloads or None), the last two as msgpack."""
        return os.getpid(), encode(self._settings), encode(None)

    def pack_lease(self, lease: Lease) -> tuple[Any, tuple[Any, ...]]:
        """Returns the lease as a message, and the object refs of the blocks that it refers to."""
        numbers: dict[ray.ObjectRef, int] = {}
        groups, locations = [], []
        for group in lease.rows:
            small: dict[str, bytes] = {}
            large: BlockLocations = {}
            for column, payload in cast(Mapping[str, bytes | _StoredPayload], group.columns).items():
                if isinstance(payload, _StoredPayload):
                    large[column] = (numbers.setdefault(payload.block, len(numbers)), payload.position)
                else:
                    small[column] = payload
            groups.append(msgspec.structs.replace(group, columns=small))
            locations.append(large)
        return (msgspec.structs.replace(lease, rows=groups), locations), tuple(numbers)

    # -- changes and time ---------------------------------------------------------------------------------------
    def _changed(self) -> None:
        self._waiting.wake()
        self._arm_expiry()

    def _arm_expiry(self) -> None:
        """Sets the one timer to the time at which the next lease runs out."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        at = self._core.leases.next_expiry()
        if at is not None:
            delay = max(0.0, at - self._core.clock())
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._core.expire()
        self._changed()
        self.remove_unnamed_media()


def _with_payloads(group: Group, large: Mapping[str, Any]) -> Group:
    return msgspec.structs.replace(group, columns={**group.columns, **large})


def _sized(large: BlockLocations, blocks: list[Block]) -> dict[str, Any]:
    return {column: blocks[number][position] for column, (number, position) in large.items()}


def _stored(large: BlockLocations, blocks: list[Block], refs: list[ray.ObjectRef]) -> dict[str, Any]:
    return {
        column: _StoredPayload(refs[number], position, len(blocks[number][position]))
        for column, (number, position) in large.items()
    }

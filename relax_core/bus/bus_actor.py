"""The bus process: one asynchronous Ray actor that wraps `ReplayBuffer` and blocks calls until they can proceed.

The process stores the run's groups and ledger, and does not import torch. A waiting call returns when it can proceed,
fails, or reaches its deadline. For each waiting call the process can report why the call waits and which tasks have to
act.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

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
from relax_core.bus.replay_buffer import HeldLease, OpenGroup, ReplayBuffer
from relax_core.bus.settings import ACTOR, BusSettings
from relax_core.contracts import columns as c
from relax_core.contracts.bus import (
    Admission,
    BusLost,
    BusProgress,
    BusTimeout,
    BusWait,
    Group,
    Lease,
    LeaseLost,
    LeaseRequest,
    VersionChange,
)
from relax_core.contracts.outage import RETRY_S

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    attempt: Callable[[], Any | None]
    explain: Callable[[float], str]
    owed_by: Callable[[], list[str]]
    timeout_s: float
    since: float  # seconds on the event loop's clock
    task: str | None
    worker: int
    future: asyncio.Future[Any]


class WaitingCalls:
    """Manages the waiting calls of one event loop, in order of arrival."""

    def __init__(self) -> None:
        self._waiters: dict[_Waiter, None] = {}

    async def wait(
        self,
        attempt: Callable[[], T | None],
        *,
        explain: Callable[[float], str],
        timeout_s: float,
        owed_by: Callable[[], list[str]] = list,
        task: str | None = None,
        worker: int = 0,
    ) -> T:
        """Calls ``attempt`` now and after each `wake`; returns the first value that is not None.

        Raises `BusTimeout` with the text ``explain(timeout_s)`` after ``timeout_s`` seconds. `fail_task` ends the
        waiting calls of a ``task`` and ``worker``. `waits` reports each call with the result of ``owed_by``: the tasks
        that have to act.
        """
        result = attempt()
        if result is not None:
            return result
        loop = asyncio.get_running_loop()
        waiter = _Waiter(
            attempt=attempt,
            explain=explain,
            owed_by=owed_by,
            timeout_s=timeout_s,
            since=loop.time(),
            task=task,
            worker=worker,
            future=loop.create_future(),
        )
        self._waiters[waiter] = None
        deadline = loop.call_later(timeout_s, self._time_out, waiter)
        try:
            return await waiter.future
        finally:
            deadline.cancel()
            self._waiters.pop(waiter, None)

    def wake(self) -> None:
        """Tries every waiting call again. Call this after each change of the state."""
        for waiter in list(self._waiters):
            try:
                result = waiter.attempt()
            except (ValueError, RuntimeError) as error:
                self._finish(waiter, error=error)
                continue
            if result is not None:
                self._finish(waiter, result=result)

    def fail_task(self, task: str, error: Exception, *, worker: int = 0) -> None:
        """Ends the waiting calls of a task's lost worker with ``error``."""
        for waiter in [waiter for waiter in self._waiters if (waiter.task, waiter.worker) == (task, worker)]:
            self._finish(waiter, error=error)

    def fail_all(self, error: Exception) -> None:
        """Ends all waiting calls with ``error``."""
        for waiter in list(self._waiters):
            self._finish(waiter, error=error)

    def waits(self) -> list[BusWait]:
        """Returns the waiting calls of named tasks, longest wait first."""
        now = asyncio.get_running_loop().time()
        return [
            BusWait(
                task=waiter.task,
                since_s=now - waiter.since,
                text=waiter.explain(now - waiter.since),
                owed_by=waiter.owed_by(),
                worker=waiter.worker,
            )
            for waiter in self._waiters
            if waiter.task is not None
        ]

    def _time_out(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:  # else the call ended in the same turn of the event loop
            self._finish(waiter, error=BusTimeout(waiter.explain(waiter.timeout_s)))

    def _finish(self, waiter: _Waiter, *, result: Any = None, error: Exception | None = None) -> None:
        """Ends a waiting call. Removes the call first, so that it cannot end twice."""
        del self._waiters[waiter]
        if error is not None:
            waiter.future.set_exception(error)
        else:
            waiter.future.set_result(result)


WRITERS = {  # column → the task that writes it; the rollout writes all other columns
    c.OLD_LOGPROBS: "actor_fwd",
    c.REFERENCE_LOGPROBS: "reference",
    c.ADVANTAGES: "advantages",
    c.RETURNS: "advantages",
    c.VALUES: "critic",
    c.TEACHER_LOGPROBS: "teacher",
    c.TEACHER_TOP_IDS: "teacher",
    c.TEACHER_TOP_LOGPROBS: "teacher",
}
ROLLOUT = "rollout"  # the task name of calls that wait for admissions
BUS = "bus"  # the name in ``owed_by`` while the ledger waits for its disk


def explain_ledger(task: str, journal: Journal, *, waited_s: float) -> str:
    """Returns a text such as "actor waits for the ledger for 3.0 s: 2 MiB wait for the disk: it is slow"."""
    head = f"{task} waits for the ledger for {waited_s:.1f} s"
    return f"{head}: {journal.waiting_bytes >> 20} MiB wait for the disk: {journal.problem or 'it is slow'}"


def explain_admit(core: ReplayBuffer, worker: int, *, waited_s: float) -> str:
    """Returns a text such as "rollout waits for credit for 30.0 s at version 3: 16 groups are outstanding: …"."""
    if core.free_slots_of(worker) <= 0:
        return f"{ROLLOUT}-{worker} has its part of the groups in flight for {waited_s:.1f} s at version {core.version}"
    head = f"rollout waits for credit for {waited_s:.1f} s at version {core.version}"
    if not core.groups:
        return f"{head}: no group is outstanding"
    parts = [
        *_in_flight(core, [group for group in core.groups.values() if group.in_flight]),
        *_count(sum(not g.in_flight and g.actor_step is None for g in core.groups.values()), "waiting in the bus"),
        *_leases(core, ACTOR),
    ]
    owes = f"actor owes the ack of step {core.version}"
    return f"{head}: {len(core.groups)} groups are outstanding: {', '.join(parts)}; {owes}"


def explain_lease(core: ReplayBuffer, request: LeaseRequest, *, waited_s: float) -> str:
    """Returns a text such as "actor waits for 8 groups at step 12 for 30.0 s: 3 in flight in rollout (…), …"."""
    at_step = f" at step {request.step}" if request.task == ACTOR else ""
    groups = "group" if request.min_groups == 1 else "groups"
    head = f"{request.task} waits for {request.min_groups} {groups}{at_step} for {waited_s:.1f} s"
    if request.task == ACTOR and request.step != core.version:
        return f"{head}: version {core.version} is in force, actor owes the ack of step {core.version}"
    free = [group for group in core.groups.values() if group.actor_step is None]
    undone = [group for group in free if request.task not in group.done and request.task not in group.leases]
    here = [group for group in undone if not group.in_flight]
    ready = sum(group.has_columns(request.columns) for group in here)
    parts = [
        *_in_flight(core, [group for group in free if group.in_flight]),
        *_lacking(here, request.columns),
        *_leases(core, request.task),
        *_count(ready, "ready"),
    ]
    return f"{head}: {', '.join(parts) if parts else 'rollout has no group in flight and owes new groups'}"


def admit_owed_by(core: ReplayBuffer, worker: int) -> list[str]:
    """Returns the tasks that must act before this rollout worker gets an admission.

    The trainer's ack allows new admissions. The list is empty if the worker has its maximum number of groups in flight.
    Then only the worker itself can act.
    """
    return [ACTOR] if core.free_slots_of(worker) > 0 else []


def lease_owed_by(core: ReplayBuffer, request: LeaseRequest) -> list[str]:
    """Returns the tasks that must act before this lease can be granted; rollout worker 1 is named "rollout-1"."""
    if request.task == ACTOR and request.step != core.version:
        return [ACTOR]
    waiting = [g for g in core.groups.values() if g.actor_step is None and not g.in_flight]
    lacking = {column for group in waiting for column in request.columns if not group.has_columns((column,))}
    writers = sorted({WRITERS.get(column, ROLLOUT) for column in lacking} - {request.task})
    sampled = [g for g in core.groups.values() if g.in_flight and g.admission.min_version <= core.version]
    workers = [f"{ROLLOUT}-{worker}" for worker in sorted({group.worker for group in sampled})]
    return [*(workers or ([] if writers else [ROLLOUT])), *writers]


def _in_flight(core: ReplayBuffer, groups: list[OpenGroup]) -> list[str]:
    if not groups:
        return []
    oldest = groups[0]
    held = sum(group.admission.min_version > core.version for group in groups)
    early = f", {held} of them wait for a later version" if held else ""
    age = core.clock() - oldest.admitted_at
    where = f"{ROLLOUT}-{oldest.worker}, " if any(group.worker for group in groups) else ""
    details = f"oldest {oldest.admission.group_uid}, {where}admitted {age:.0f} s ago{early}"
    return [f"{len(groups)} in flight in rollout ({details})"]


def _lacking(groups: list[OpenGroup], columns: tuple[str, ...]) -> list[str]:
    lacking: dict[str, list[str]] = {}
    for group in groups:
        for column in columns:
            if not group.has_columns((column,)):
                lacking.setdefault(column, []).append(group.admission.group_uid)
    return [f"{len(uids)} lack column {column} (first {uids[0]})" for column, uids in sorted(lacking.items())]


def _leases(core: ReplayBuffer, task: str) -> list[str]:
    return [_describe(core, lease) for lease in core.leases.of_task(task)]


def _describe(core: ReplayBuffer, lease: HeldLease) -> str:
    step = f" for step {lease.step}" if lease.step is not None else ""
    age = core.clock() - lease.leased_at
    return f"{len(lease.group_uids)} leased by {lease.task}{step} (lease {lease.lease_id}, {age:.0f} s ago)"


def _count(count: int, what: str) -> list[str]:
    return [f"{count} {what}"] if count else []


Answer = bytes | tuple[Any, ...]  # an encoded Reply, followed by the object refs of its blocks, if any

_groups_decoder = msgspec.msgpack.Decoder(PutMessage)
_request_decoder = msgspec.msgpack.Decoder(LeaseRequest)
_columns_decoder = msgspec.msgpack.Decoder(WriteMessage)


@dataclass(frozen=True, slots=True)
class _StoredPayload:
    """Refers to a large payload in Ray's object store: one array of a block that this process has stored."""

    block: ray.ObjectRef
    position: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def answers(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Answer]]:
    """Wraps a method so that its value, or its error if it is in `ERRORS`, is returned as a `Reply`."""

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
    """Runs the bus process; `RayBus` is its client. Parameters are msgpack bodies and deadlines in seconds."""

    def __init__(self, settings: bytes, ledger_path: str) -> None:
        self._settings = msgspec.msgpack.decode(settings, type=BusSettings)
        self._journal = Journal(Path(ledger_path))
        ledger = Ledger(group_size=self._settings.group_size, journal=self._journal)
        self._core = ReplayBuffer(self._settings, ledger=ledger, clock=time.monotonic)
        self._waiting = WaitingCalls()
        self._expiry: asyncio.TimerHandle | None = None
        self._drain: asyncio.TimerHandle | None = None  # next check of a journal with too many unwritten events
        self._snapshots: dict[object, float] = {}  # start times (loop's clock) of snapshots that wait for the disk
        self._media = self._stored_media()
        self._lost: BusLost | None = None  # set by a subclass if processes with payloads have exited

    # -- calls of the rollout ------------------------------------------------------------------------------------
    @answers
    async def admit(self, max_groups: int, worker: int, timeout_s: float) -> Any:
        """Waits for admissions."""
        return await self._waiting.wait(
            lambda: self._admit(max_groups, worker),
            explain=lambda waited_s: (
                explain_ledger(ROLLOUT, self._journal, waited_s=waited_s)
                if self._journal.overfull
                else explain_admit(self._core, worker, waited_s=waited_s)
            ),
            timeout_s=timeout_s,
            owed_by=lambda: [BUS] if self._journal.overfull else admit_owed_by(self._core, worker),
            task=ROLLOUT,
            worker=worker,
        )

    def _admit(self, max_groups: int, worker: int) -> list[Admission] | None:
        """Admits groups. While too many events wait for the disk, schedules another check and returns None."""
        if not self._journal.overfull:
            return self._core.admit(max_groups, worker=worker) or None
        if self._drain is None:
            self._drain = asyncio.get_running_loop().call_later(RETRY_S, self._look_at_journal)
        return None

    def _look_at_journal(self) -> None:
        self._drain = None
        self._waiting.wake()

    @answers
    async def reclaim(self, worker: int) -> Any:
        """Returns the worker's admissions in flight, and ends the waiting calls of the worker's previous process."""
        reclaimed = self._core.reclaim(worker=worker)
        # Ray does not cancel the call of a killed process. The call would get admissions that no process uses.
        lost = LeaseLost(f"the admissions of an earlier process of {ROLLOUT}-{worker} were reclaimed")
        self._waiting.fail_task(ROLLOUT, lost, worker=worker)
        return reclaimed

    @answers
    async def put(self, body: bytes, blocks: list[Block]) -> None:
        """Adds complete groups and stores the large payloads of accepted groups in the object store."""
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
        """Waits for a version change. After ``timeout_s``, returns the unchanged version without groups."""
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
        """Records that a rollout worker uses these items; returns the digests of items without a file on its node."""
        media = self._require_media()
        self._core.hold(items, worker=worker)
        if isinstance(media, MediaNodes):
            return await media.missing(list(items), node_id=node_id)
        media.keep_sweeping(self._core.media)
        return await media.missing(list(items))

    @answers
    async def release_items(self, digests: list[str], worker: int) -> None:
        self._core.release_items(digests, worker=worker)

    @answers
    async def open_media(self, node_id: str) -> None:
        await self._media_nodes().open(node_id)

    @answers
    async def fetch_media(self, digests: list[str], node_id: str, timeout_s: float) -> None:
        await self._media_nodes().fetch(digests, node_id=node_id, timeout_s=timeout_s)

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
        """Starts to remove the files of items without references."""
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
        """Adds columns to a lease's groups and ends the lease. Then waits for the next lease, if ``then`` is given."""
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
        """Records a train step. Then waits for the next lease, if ``then`` is given."""
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
        return self._progress()

    def _progress(self) -> BusProgress:
        return msgspec.structs.replace(self._core.progress(), ledger_problem=self._journal.problem)

    @answers
    async def waits(self) -> Any:
        now = asyncio.get_running_loop().time()
        snapshots = [
            BusWait(
                task=ACTOR,
                since_s=now - since,
                text=explain_ledger(ACTOR, self._journal, waited_s=now - since),
                owed_by=[BUS],
            )
            for since in self._snapshots.values()
        ]
        return [*snapshots, *self._waiting.waits()]

    @answers
    async def wait_progress(self, since_version: int, timeout_s: float) -> Any:
        """Returns the counts when the version changes or the bus is closed, but at most after ``timeout_s`` seconds."""

        def attempt() -> BusProgress | None:
            moved = self._core.version != since_version or self._core.close_reason is not None
            return self._progress() if moved else None

        try:
            return await self._waiting.wait(attempt, explain=lambda _: "", timeout_s=timeout_s)
        except BusTimeout:
            return self._progress()

    @answers
    async def snapshot(self, timeout_s: float) -> Any:
        """Waits until the ledger's events are on disk, then returns the state for a checkpoint."""
        snapshot, waits = self._core.snapshot(), object()
        self._snapshots[waits] = asyncio.get_running_loop().time()
        try:
            await asyncio.to_thread(self._journal.flush, timeout_s=timeout_s)
        finally:
            del self._snapshots[waits]
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
        """Returns (process id, settings, location of the payloads or None). Settings and location are msgpack."""
        return os.getpid(), encode(self._settings), encode(None)

    def pack_lease(self, lease: Lease) -> tuple[Any, tuple[Any, ...]]:
        """Returns the lease as a message, and the object refs of the blocks with its large payloads."""
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
        """Sets the timer to the time when the next lease expires."""
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

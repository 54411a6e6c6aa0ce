"""The client of the bus process, `RayBus`, for all processes of the run. Implements `relax_core.contracts.bus.Bus`.

A message is a msgpack body, which contains the small payloads, and blocks with the large payloads. A block is a list of
uint8 arrays of one column. Ray transfers blocks out of band, and readers map them without a copy.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.bus.journal import LedgerUnwritable
from relax_core.bus.settings import BusSettings
from relax_core.contracts.bus import (
    Admission,
    BusClosed,
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
from relax_core.contracts.columns import PERSISTED_COLUMNS, media_sizes
from relax_core.contracts.media import MediaGone, MediaReader
from relax_core.contracts.media_file import FolderReader, NodeReader, node_folder
from relax_core.contracts.monitor import Waiting

BLOCK_BYTES = 64 * 1024 * 1024  # size of a full block: a leased group keeps its whole blocks in memory

Block = list[np.ndarray]
BlockLocation = tuple[int, int]  # (index of the block, index in the block)
BlockLocations = dict[str, BlockLocation]  # by column
# Each group is sent with its small payloads and the locations of its large payloads.
PutMessage = list[tuple[Group, BlockLocations]]
WriteMessage = dict[str, tuple[dict[str, bytes], BlockLocations]]  # by group_uid
LeaseMessage = tuple[Lease, list[BlockLocations]]

# Types of errors that the client raises as the bus process raised them.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (BusTimeout, BusClosed, BusLost, LeaseLost, MediaGone, LedgerUnwritable, ValueError)
}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Holds the reply to a call: ``value``, or a name in `ERRORS` as ``error``, and the error's ``text``."""

    error: str
    text: str
    value: msgspec.Raw


class BlockPacker:
    """Splits the payloads of one call into small payloads for the body and blocks of large payloads."""

    def __init__(self, *, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._filling: dict[str, tuple[int, int]] = {}  # column → (index of its open block, bytes in this block)
        self.blocks: list[Block] = []

    def split(self, columns: Mapping[str, bytes]) -> tuple[dict[str, bytes], BlockLocations]:
        """Returns (small payloads for the body, locations of the large payloads in `blocks`)."""
        small: dict[str, bytes] = {}
        large: BlockLocations = {}
        for column, payload in columns.items():
            if len(payload) <= self._inline_bytes or column in PERSISTED_COLUMNS:
                small[column] = payload
            else:
                large[column] = self._add_to_block(column, payload)
        return small, large

    def _add_to_block(self, column: str, payload: bytes) -> BlockLocation:
        number, filled = self._filling.get(column, (-1, BLOCK_BYTES))
        if filled >= BLOCK_BYTES:
            number, filled = len(self.blocks), 0
            self.blocks.append([])
        self.blocks[number].append(np.frombuffer(payload, dtype=np.uint8))
        self._filling[column] = (number, filled + len(payload))
        return number, len(self.blocks[number]) - 1


def join(columns: dict[str, bytes], large: BlockLocations, blocks: Iterable[Block]) -> dict[str, bytes]:
    """Returns all columns of a leased group. Large payloads are read-only memoryviews of the object store."""
    blocks = list(blocks)
    views = {column: cast(bytes, blocks[number][position].data) for column, (number, position) in large.items()}
    return columns | views


_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    """Returns ``value`` as msgpack."""
    return _encoder.encode(value)


# The bus process enforces the deadlines. After this additional time the client reports that the process is stuck.
ANSWER_GRACE_S = 10.0
PROCESS_EXITED = "the bus process has exited"

T = TypeVar("T")

_reply_decoder = msgspec.msgpack.Decoder(Reply)
_lease_decoder = msgspec.msgpack.Decoder(LeaseMessage | None)


class RayBus:
    """Calls the bus process. The client can be pickled for Ray actors, and any thread may use it.

    `relax_core.contracts.bus.Bus` describes the methods. The bus process ends when its creator ends, or by `terminate`.
    """

    def __init__(self, actor: Any, *, settings: BusSettings) -> None:
        self._actor = actor
        self.settings = settings

    # -- calls of the rollout ------------------------------------------------------------------------------------
    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        call = self._call("admit", max_groups, worker, timeout_s, timeout_s=timeout_s)
        return _decode(await call, list[Admission])

    async def reclaim(self, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        return _decode(await self._call("reclaim", worker, timeout_s=timeout_s), list[Admission])

    async def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        await self._call("put", *self._pack_groups(groups), timeout_s=timeout_s)

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        await self._call("drop", group_uid, reason, timeout_s=timeout_s)

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        await self._call("name_modalities", dict(modalities), timeout_s=timeout_s)

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        call = self._call("wait_version", since_version, worker, timeout_s, timeout_s=timeout_s)
        return _decode(await call, VersionChange)

    # -- media items ----------------------------------------------------------------------------------------------
    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        call = self._call("hold", dict(items), worker, self._node(), timeout_s=timeout_s)
        return _decode(await call, list[str])

    async def release_items(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        await self._call("release_items", list(digests), worker, timeout_s=timeout_s)

    async def media_folder(self, *, timeout_s: float) -> Path:
        folder = Path(self.settings.media_folder)
        if not self.settings.media_nodes:
            return folder
        await self._call("open_media", self._node(), timeout_s=timeout_s)
        return node_folder(folder, self._node())

    async def fetch_media(self, digests: Sequence[str], *, node_id: str = "", timeout_s: float) -> None:
        if self.settings.media_nodes:
            await self._call("fetch_media", list(digests), node_id or self._node(), timeout_s, timeout_s=timeout_s)

    def media_reader(self, *, timeout_s: float) -> MediaReader:
        folder = Path(self.settings.media_folder)
        if not self.settings.media_nodes:
            return FolderReader(folder)

        def bring(digests: Sequence[str]) -> None:
            blocking(self.fetch_media(digests, timeout_s=timeout_s))

        return NodeReader(node_folder(folder, self._node()), fetch=bring)

    def _node(self) -> str:
        """Returns the id of this process's Ray node; "" if all nodes use one media folder."""
        return str(ray.get_runtime_context().get_node_id()) if self.settings.media_nodes else ""

    def _pack_groups(self, groups: Sequence[Group]) -> tuple[bytes, list[Block]]:
        packer = BlockPacker(inline_bytes=self.settings.inline_bytes)
        message: PutMessage = []
        for group in groups:
            small, large = packer.split(group.columns)
            message.append((msgspec.structs.replace(group, columns=small, media=media_sizes(group.columns)), large))
        return encode(message), packer.blocks

    # -- calls of workers that lease ------------------------------------------------------------------------------
    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = await self._call_for_lease("lease", encode(request), timeout_s, timeout_s=timeout_s)
        assert lease is not None
        return lease

    async def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[Group]:
        lease = await self._call_for_lease("read", lease_id, list(group_uids), list(columns), timeout_s=timeout_s)
        assert lease is not None
        return lease.rows

    async def write(
        self,
        lease_id: int,
        columns: Mapping[str, Mapping[str, bytes]],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        packer = BlockPacker(inline_bytes=self.settings.inline_bytes)
        body = encode({uid: packer.split(payloads) for uid, payloads in columns.items()})
        request = encode(then) if then else None
        return await self._call_for_lease(
            "write", lease_id, body, packer.blocks, request, timeout_s, timeout_s=timeout_s
        )

    async def ack(
        self,
        lease_ids: Sequence[int],
        *,
        step: int,
        dropped: Mapping[str, str],
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        request = encode(then) if then else None
        return await self._call_for_lease(
            "ack", list(lease_ids), step, dict(dropped), request, timeout_s, timeout_s=timeout_s
        )

    async def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        await self._call("release", list(lease_ids), timeout_s=timeout_s)

    async def revoke(self, task: str, *, timeout_s: float) -> None:
        await self._call("revoke", task, timeout_s=timeout_s)

    # -- calls of the controller ---------------------------------------------------------------------------------
    async def progress(self, *, timeout_s: float) -> BusProgress:
        return _decode(await self._call("progress", timeout_s=timeout_s), BusProgress)

    async def waits(self, *, timeout_s: float) -> list[BusWait]:
        return _decode(await self._call("waits", timeout_s=timeout_s), list[BusWait])

    async def wait_progress(self, since_version: int, *, timeout_s: float) -> BusProgress:
        """Waits up to ``timeout_s`` seconds until the version is no longer ``since_version`` or the bus is closed."""
        call = self._call("wait_progress", since_version, timeout_s, timeout_s=timeout_s)
        return _decode(await call, BusProgress)

    async def snapshot(self, *, timeout_s: float) -> bytes:
        return _decode(await self._call("snapshot", timeout_s, timeout_s=timeout_s), bytes)

    async def restore(self, snapshot: bytes, *, timeout_s: float) -> None:
        await self._call("restore", snapshot, timeout_s=timeout_s)

    async def close(self, *, reason: str, timeout_s: float) -> None:
        await self._call("close", reason, timeout_s, timeout_s=timeout_s)

    def process_id(self, *, timeout_s: float) -> int:
        """Returns the id of the bus process."""
        return describe(self._actor, timeout_s=timeout_s)[0]

    def terminate(self) -> None:
        """Ends the bus process. Call `close` first to write the ledger to disk."""
        ray.kill(self._actor)

    # -- transport ----------------------------------------------------------------------------------------------
    async def _call(self, method: str, *args: Any, timeout_s: float) -> msgspec.Raw:
        return open_answer(await self._answer(method, *args, timeout_s=timeout_s))[0]

    async def _call_for_lease(self, method: str, *args: Any, timeout_s: float) -> Lease | None:
        value, refs = open_answer(await self._answer(method, *args, timeout_s=timeout_s))
        message = _lease_decoder.decode(value)
        if message is None:
            return None
        lease, locations = message
        blocks: list[Block] = await _values(refs, timeout_s=timeout_s, what=f"the payloads of a {method}")
        groups = [
            msgspec.structs.replace(group, columns=join(group.columns, large, blocks))
            for group, large in zip(lease.rows, locations, strict=True)
        ]
        return msgspec.structs.replace(lease, rows=groups)

    async def _answer(self, method: str, *args: Any, timeout_s: float) -> Any:
        (answer,) = await _values([getattr(self._actor, method).remote(*args)], timeout_s=timeout_s, what=method)
        return answer


async def _values(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """Returns the values of object refs. Raises the errors of `get`."""
    try:
        async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
            return await asyncio.gather(*references)
    except TimeoutError:
        raise _no_answer(what, timeout_s) from None
    except (ActorDiedError, ActorUnavailableError) as error:
        raise _lost(what, error) from error


def describe(actor: Any, *, timeout_s: float) -> tuple[int, BusSettings, bytes]:
    """Returns (process id, settings, location of the payloads as msgpack) of a bus process."""
    process_id, settings, location = get(actor.describe.remote(), timeout_s=timeout_s, what="describe")
    return process_id, msgspec.msgpack.decode(settings, type=BusSettings), location


def get(references: Any, *, timeout_s: float, what: str) -> Any:
    """Returns the values of object refs.

    Raises `BusTimeout` if the values do not arrive in time, and `BusLost` if the bus process has exited.
    """
    try:
        return ray.get(references, timeout=timeout_s + ANSWER_GRACE_S)
    except GetTimeoutError:
        raise _no_answer(what, timeout_s) from None
    except (ActorDiedError, ActorUnavailableError) as error:
        raise _lost(what, error) from error


def _no_answer(what: str, timeout_s: float) -> BusTimeout:
    return BusTimeout(
        f"the bus process did not answer {what} within {timeout_s + ANSWER_GRACE_S:.1f} s: it is stuck or stopped"
    )


def _lost(what: str, error: Exception) -> BusLost:
    return BusLost(f"{PROCESS_EXITED} (call: {what}): {str(error).splitlines()[0]}")


def open_answer(answer: Any) -> tuple[msgspec.Raw, list[Any]]:
    """Returns (the reply's value, the object refs of its blocks), or raises the reply's error."""
    body, *refs = answer if isinstance(answer, tuple) else (answer,)
    reply = _reply_decoder.decode(body)
    if reply.error:
        raise ERRORS[reply.error](reply.text)
    return reply.value, refs


def _decode(value: msgspec.Raw, kind: type[T]) -> T:
    return msgspec.msgpack.decode(value, type=kind)


TRACED_CALLS = (  # `wait_progress` is left out, because its caller is idle
    *("admit", "put", "drop", "hold", "name_modalities"),
    *("lease", "read", "write", "ack", "release", "snapshot"),
)


def traced_bus(bus: RayBus, waiting: Waiting) -> RayBus:
    """Returns a bus that records its waiting calls in ``waiting``."""
    return cast(RayBus, _TracedBus(bus, waiting))


class _TracedBus:
    def __init__(self, bus: RayBus, waiting: Waiting) -> None:
        self._bus = bus
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bus, name)
        if name not in TRACED_CALLS:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            with self._waiting(name, on="bus"):
                return await method(*args, **kwargs)

        return call


# -- Calls for threads without an event loop: the thread blocks until the call returns ---------------------------------
class _ThreadLoop:
    """Owns the event loop of one thread. The loop is closed with the thread; in the main thread, with the process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        closing = weakref.finalize(self, self.runner.close)
        # At the process's exit, other threads may still be in calls, and a loop may only be closed by its thread.
        closing.atexit = threading.current_thread() is threading.main_thread()


_thread = threading.local()


def blocking(call: Coroutine[Any, Any, T]) -> T:
    """Runs ``call`` and returns its result. No event loop may be running in the calling thread.

    All calls of a thread share one event loop, because creating a loop takes longer than most calls of the bus.
    """
    held: _ThreadLoop | None = getattr(_thread, "loop", None)
    if held is None:
        held = _thread.loop = _ThreadLoop()
    return held.runner.run(call, context=contextvars.copy_context())

"""A client of a data plane: writes and reads columns of rows, with a deadline on every call."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from relax_core.bus.transfer_queue.messages import PlaneAddress, Server, StoredColumns, new_key
from relax_core.bus.transfer_queue.sockets import use_unix_sockets
from relax_core.contracts.bus import BusLost, BusTimeout, LeaseLost
from relax_core.contracts.columns import PERSISTED_COLUMNS

LOOK_S = 1.0  # how often a waiting call looks whether the servers still live
KEY = "relax_key"  # the field beside the columns that says whose they are

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewSample:
    """What one call writes for one row, beside what the books keep."""

    key: str
    columns: dict[str, bytes]

    @classmethod
    def of(cls, group_uid: str, columns: Mapping[str, bytes], *, timeout_s: float) -> NewSample:
        """``timeout_s``: when its writer gives up."""
        carried = {column: payload for column, payload in columns.items() if column not in PERSISTED_COLUMNS}
        return cls(new_key(group_uid, timeout_s=timeout_s), carried)


class PlaneClient:
    """One a process and plane; safe to use from many threads. Its requests run on a thread of its own.

    The coroutines below belong to that thread: hand them to `call` or `call_async`. ``inline_bytes``: larger payloads
    travel as frames of their own, without a copy.
    """

    def __init__(self, address: PlaneAddress, *, inline_bytes: int = 0) -> None:
        use_unix_sockets()
        from transfer_queue.client import AsyncTransferQueueClient

        self._address = address
        self._inline_bytes = inline_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()
        self._client = AsyncTransferQueueClient(
            f"relax_{os.getpid()}",
            controller_info=_server_info(address.controller, role="CONTROLLER"),
            zmq_io_threads=1,
        )
        units = {unit.server_id: _server_info(unit, role="STORAGE") for unit in address.units}
        self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        self._storage = self._client.storage_manager

    # -- calls with a deadline ----------------------------------------------------------------------------------
    def call(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Raises `BusLost` as soon as a server is gone, `BusTimeout` after ``timeout_s``; both name the servers."""
        guarded = self._guarded(request, timeout_s=timeout_s, what=what)
        return asyncio.run_coroutine_threadsafe(guarded, self._loop).result()

    async def call_async(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        guarded = self._guarded(request, timeout_s=timeout_s, what=what)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(guarded, self._loop))

    async def _guarded(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        task = asyncio.ensure_future(request)
        deadline = self._loop.time() + timeout_s
        try:
            while not task.done():
                left_s = deadline - self._loop.time()
                if left_s <= 0:
                    servers = ", ".join(f"{server.title} (process {server.pid})" for server in self._address.servers)
                    raise BusTimeout(f"no answer to {what} within {timeout_s:.1f} s: one of these is stuck: {servers}")
                await asyncio.wait({task}, timeout=min(LOOK_S, left_s))
                if not task.done():
                    self._require_servers(what)
        finally:
            task.cancel()
        if task.exception() is not None:
            self._require_servers(what)
        return task.result()

    def _require_servers(self, what: str) -> None:
        for server in self._address.servers:
            if not lives(server.pid):
                raise BusLost(f"{server.title} is gone (process {server.pid}, call: {what})")

    # -- requests -----------------------------------------------------------------------------------------------
    async def put(self, partition: str, samples: Sequence[NewSample]) -> list[StoredColumns | None]:
        """Stores samples; None for one without columns."""
        stored: list[StoredColumns | None] = [None] * len(samples)
        for columns, places in _alike(tuple(sample.columns) for sample in samples).items():
            if not columns:
                continue
            fields: dict[str, list[Any]] = {KEY: [samples[place].key for place in places]}
            for column in columns:
                fields[column] = [self._as_value(samples[place].columns[column]) for place in places]
            metadata = await self._client.async_kv_retrieve_meta(fields[KEY], partition, create=True)
            await self._storage.put_data(_tensor_dict(fields), metadata)
            for place, index in zip(places, metadata.global_indexes, strict=True):
                sizes = {column: len(payload) for column, payload in samples[place].columns.items()}
                stored[place] = StoredColumns(samples[place].key, index, sizes)
        return stored

    def _as_value(self, payload: bytes) -> bytes | np.ndarray:
        return payload if len(payload) <= self._inline_bytes else np.frombuffer(payload, dtype=np.uint8)

    async def get(self, partition: str, wanted: Sequence[StoredColumns]) -> list[dict[str, bytes]]:
        """The columns of each sample; large ones are read-only memoryviews of what came in.

        Raises `LeaseLost` when a sample was cleared: its group has ended.
        """
        alike = _alike(tuple(sample.sizes) for sample in wanted)
        answers = await asyncio.gather(
            *(self._get(partition, columns, [wanted[place] for place in places]) for columns, places in alike.items())
        )
        found = {
            place: row
            for places, rows in zip(alike.values(), answers, strict=True)
            for place, row in zip(places, rows, strict=True)
        }
        return [found[place] for place in range(len(wanted))]

    async def _get(
        self, partition: str, columns: tuple[str, ...], samples: Sequence[StoredColumns]
    ) -> list[dict[str, bytes]]:
        from transfer_queue.metadata import BatchMeta
        from transfer_queue.storage import StorageKeyNotFoundError

        indexes = [sample.index for sample in samples]
        # Places that we know: the controller's samplers are passed by, who gets what is the bus's decision.
        metadata = BatchMeta(indexes, [partition] * len(indexes), {field: {} for field in (KEY, *columns)})
        try:
            answer = await self._storage.get_data(metadata)
        except StorageKeyNotFoundError:
            raise _ended(samples) from None
        if list(answer[KEY]) != [sample.key for sample in samples]:
            raise _ended(samples)
        fields = {column: list(answer[column]) for column in columns}
        return [{column: _as_payload(fields[column][place]) for column in columns} for place in range(len(samples))]

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Frees samples by key: a key that is gone cannot free what has its place now."""
        metadata = await self._client.async_kv_retrieve_meta(list(keys), partition, create=False)
        if metadata.size:
            await self._client.async_clear_samples(metadata)

    async def keys(self, partition: str) -> list[str]:
        answer = await self._client.async_kv_list(partition)
        return list(answer.get(partition, ()))

    def close(self) -> None:
        """Ends its threads. No call may be under way."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._client.close()
        self._loop.close()


def _alike(kinds: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Columns → the places that have just these: one request has the same columns in every row."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return places


def _server_info(server: Server, *, role: str) -> Any:
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    return ZMQServerInfo(role=Role[role], id=server.server_id, ip=server.folder, ports=server.ports)


def _tensor_dict(fields: Mapping[str, list[Any]]) -> Any:
    from tensordict import NonTensorStack, TensorDict

    return TensorDict({name: NonTensorStack(*values) for name, values in fields.items()}, batch_size=len(fields[KEY]))


def _as_payload(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
        view: Any = value.data
        return view
    assert isinstance(value, bytes)
    return value


def _ended(samples: Sequence[StoredColumns]) -> LeaseLost:
    groups = ", ".join(sample.key.partition(":")[0] for sample in samples[:4])
    return LeaseLost(
        f"rows of this lease ended while they were read (it had {groups}, …): they were dropped or trained"
    )


def lives(pid: int) -> bool:
    """Whether the process is there, be it stopped or running."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

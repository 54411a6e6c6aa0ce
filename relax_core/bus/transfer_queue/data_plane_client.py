"""A client of a data plane: it writes and reads the columns of groups, with a deadline on every call."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import psutil

from relax_core.bus.transfer_queue.messages import PlaneAddress, Server, StoredColumns, new_key
from relax_core.bus.transfer_queue.sockets import use_unix_sockets
from relax_core.contracts.bus import BusLost, BusTimeout, LeaseLost
from relax_core.contracts.columns import PERSISTED_COLUMNS

CHECK_S = 1.0  # a waiting call checks at this interval whether the servers still run
KEY = "relax_key"  # the field that holds each sample's key, beside the columns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewSample:
    """Holds the columns that one call writes for one group, without those that travel to the bus process."""

    key: str
    columns: dict[str, bytes]

    @classmethod
    def of(cls, group_uid: str, columns: Mapping[str, bytes], *, timeout_s: float) -> NewSample:
        """Makes a sample of a group's columns. ``timeout_s`` is the writer's deadline in seconds, stored in the key."""
        carried = {column: payload for column, payload in columns.items() if column not in PERSISTED_COLUMNS}
        return cls(new_key(group_uid, timeout_s=timeout_s), carried)


class PlaneClient:
    """Is the client of a data plane, one for each process and plane; any thread may use it.

    Its requests run on a thread of their own, and the coroutines below run on that thread only: pass them to `call` or
    `call_async`. Payloads larger than ``inline_bytes`` travel as separate frames, without a copy.
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
        """Runs a request and returns its value.

        Raises `BusLost` as soon as a server has exited and `BusTimeout` after ``timeout_s`` seconds; both name the
        servers.
        """
        guarded = self._guarded(request, timeout_s=timeout_s, what=what)
        return asyncio.run_coroutine_threadsafe(guarded, self._loop).result()

    async def call_async(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Runs a request from an event loop of another thread; errors are those of `call`."""
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
                await asyncio.wait({task}, timeout=min(CHECK_S, left_s))
                if not task.done():
                    self._require_servers(what)
        finally:
            task.cancel()
        if task.exception() is not None:
            self._require_servers(what)
        return task.result()

    def _require_servers(self, what: str) -> None:
        for server in self._address.servers:
            if not psutil.pid_exists(server.pid):
                raise BusLost(f"{server.title} has exited (process {server.pid}, call: {what})")

    # -- requests -----------------------------------------------------------------------------------------------
    async def put(self, partition: str, samples: Sequence[NewSample]) -> list[list[StoredColumns]]:
        """Stores samples and returns where each is, as a list: empty for a sample without columns."""
        stored: list[list[StoredColumns]] = [[] for _ in samples]
        for columns, positions in _positions_by_columns(tuple(sample.columns) for sample in samples).items():
            if not columns:
                continue
            fields: dict[str, list[Any]] = {KEY: [samples[position].key for position in positions]}
            for column in columns:
                fields[column] = [self._as_value(samples[position].columns[column]) for position in positions]
            metadata = await self._client.async_kv_retrieve_meta(fields[KEY], partition, create=True)
            await self._storage.put_data(_tensor_dict(fields), metadata)
            for position, index in zip(positions, metadata.global_indexes, strict=True):
                sizes = {column: len(payload) for column, payload in samples[position].columns.items()}
                stored[position].append(StoredColumns(samples[position].key, index, sizes))
        return stored

    def _as_value(self, payload: bytes) -> bytes | np.ndarray:
        return payload if len(payload) <= self._inline_bytes else np.frombuffer(payload, dtype=np.uint8)

    async def get(self, partition: str, wanted: Sequence[StoredColumns]) -> list[dict[str, bytes]]:
        """Returns the columns of each sample; large payloads are read-only memoryviews of the received bytes.

        Raises `LeaseLost` if a sample was cleared, because its group has ended.
        """
        groups = _positions_by_columns(tuple(sample.sizes) for sample in wanted)
        answers = await asyncio.gather(
            *(
                self._get(partition, columns, [wanted[position] for position in positions])
                for columns, positions in groups.items()
            )
        )
        found = {
            position: columns
            for positions, answer in zip(groups.values(), answers, strict=True)
            for position, columns in zip(positions, answer, strict=True)
        }
        return [found[position] for position in range(len(wanted))]

    async def _get(
        self, partition: str, columns: tuple[str, ...], samples: Sequence[StoredColumns]
    ) -> list[dict[str, bytes]]:
        from transfer_queue.metadata import BatchMeta
        from transfer_queue.storage import StorageKeyNotFoundError

        indexes = [sample.index for sample in samples]
        # The bus decides which task gets which sample: the request names indexes and uses no sampler of the library.
        metadata = BatchMeta(indexes, [partition] * len(indexes), {field: {} for field in (KEY, *columns)})
        try:
            answer = await self._storage.get_data(metadata)
        except StorageKeyNotFoundError:
            raise _ended(samples) from None
        if list(answer[KEY]) != [sample.key for sample in samples]:
            raise _ended(samples)
        fields = {column: list(answer[column]) for column in columns}
        return [
            {column: _as_payload(fields[column][position]) for column in columns} for position in range(len(samples))
        ]

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Frees samples by key. A key that was cleared before cannot free the later sample at the same index."""
        metadata = await self._client.async_kv_retrieve_meta(list(keys), partition, create=False)
        if metadata.size:
            await self._client.async_clear_samples(metadata)

    async def keys(self, partition: str) -> list[str]:
        """Returns all keys of a partition."""
        answer = await self._client.async_kv_list(partition)
        return list(answer.get(partition, ()))

    def close(self) -> None:
        """Ends the client's threads. No call may be in progress."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._client.close()
        self._loop.close()


def _positions_by_columns(kinds: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Returns columns → positions of the samples with these columns: all samples of a request have the same ones."""
    positions: dict[tuple[str, ...], list[int]] = {}
    for position, kind in enumerate(kinds):
        positions.setdefault(kind, []).append(position)
    return positions


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
        f"groups of this lease ended while they were read (it had {groups}, …): they were dropped or trained"
    )

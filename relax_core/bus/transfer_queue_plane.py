"""The data plane of bus=transfer_queue: TransferQueue's server processes, their sockets, and the client.

TransferQueue listens on TCP ports of the node's address, does not authenticate clients, and unpickles received data.
For protection, Relax replaces the TCP ports by Unix sockets in a folder that only this user may enter. The library has
no setting for Unix sockets, so `use_unix_sockets` and `serve_below` replace three helper functions that make addresses:
the "IP" of a server becomes its folder, and its "ports" become names of sockets in this folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import ray

from relax_core.contracts.bus import BusLost, BusTimeout, Group, Lease, LeaseLost
from relax_core.contracts.columns import PERSISTED_COLUMNS

GRACE_S = 60.0  # maximum delay after a call's deadline until the call reaches the bus


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a TransferQueue server. ``title``: its name in errors. ``folder``, ``ports``: where its sockets are."""

    title: str
    pid: int
    server_id: str
    folder: str
    ports: dict[str, int]


class PlaneAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Lists the servers of a data plane: the controller and the storage units.

    All processes must use the same order of ``units``, because the order determines which unit stores a sample.
    """

    controller: Server
    units: list[Server]

    @property
    def servers(self) -> tuple[Server, ...]:
        """Returns all servers, the controller first."""
        return (self.controller, *self.units)


class PayloadLocation(msgspec.Struct, frozen=True):
    """Identifies where a bus stores its payloads: a partition of a data plane."""

    plane: PlaneAddress
    partition: str


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """Describes one sample of TransferQueue: the columns that one call has written for one group.

    ``key`` is unique. ``index`` is the sample's index in the partition; after the sample is cleared, another sample
    gets its index. ``sizes`` maps each column to its number of bytes.
    """

    key: str
    index: int
    sizes: dict[str, int]


# Each group is sent with the payloads that the ledger persists and the locations of its stored samples.
PutMessage = list[tuple[Group, list[StoredColumns]]]
WriteMessage = dict[str, tuple[dict[str, bytes], list[StoredColumns]]]  # by group_uid
LeaseMessage = tuple[Lease, list[list[StoredColumns]]]


def new_key(group_uid: str, *, timeout_s: float) -> str:
    """Returns a unique key for a sample.

    The key contains the time after which the sample's writer can no longer report the sample to the bus. If the bus
    does not know the sample by then, the sample is abandoned.
    """
    return f"{group_uid}:{secrets.token_hex(4)}:{time.time() + timeout_s + GRACE_S:.0f}"


def abandoned(keys: Iterable[str], known: Mapping[str, object], *, now: float) -> list[str]:
    """Returns the keys of samples that were not reported to the bus before the deadline in the key."""
    return [key for key in keys if key not in known and float(key.rpartition(":")[2]) < now]


def use_unix_sockets() -> None:
    """Replaces the library's TCP addresses by Unix sockets. Call this before the first connection to a server."""
    # The library reads this variable at import. With more threads a get of 64 x 200 KB is twenty times slower.
    os.environ["TQ_NUM_THREADS"] = "1"
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage
    from transfer_queue.utils import zmq_utils

    for module in (zmq_utils, controller, simple_storage):
        module.format_zmq_address = _unix_address


def serve_below(folder: Path) -> None:
    """Makes the next server of this process listen in ``folder``. Each server needs a separate folder."""
    use_unix_sockets()
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage

    names = itertools.count()
    for module in (controller, simple_storage):
        module.get_node_ip_address = lambda: str(folder)
        module.get_free_port = lambda ip: next(names)


def _unix_address(ip: str, port: int) -> str:
    return f"ipc://{ip}/{port}"


CHECK_S = 1.0  # interval at which a waiting call checks that the servers still run
KEY = "relax_key"  # the additional field with each sample's key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewSample:
    """Holds the columns that one call writes for one group, except columns that are sent to the bus process."""

    key: str
    columns: dict[str, bytes]

    @classmethod
    def of(cls, group_uid: str, columns: Mapping[str, bytes], *, timeout_s: float) -> NewSample:
        """Makes a sample from a group's columns. The key stores the writer's deadline, now + ``timeout_s`` seconds."""
        carried = {column: payload for column, payload in columns.items() if column not in PERSISTED_COLUMNS}
        return cls(new_key(group_uid, timeout_s=timeout_s), carried)


class PlaneClient:
    """Connects a process to a data plane. A process has one client per plane; any thread may use the client.

    Requests are coroutines that run in the client's thread: pass them to `call`. Payloads larger than ``inline_bytes``
    are sent as separate frames, without a copy.
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
    async def call(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Runs a request and returns its value.

        Raises `BusLost` as soon as a server has exited, and `BusTimeout` after ``timeout_s`` seconds. The errors name
        the servers.
        """
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
        """Stores samples. Returns a location list for each sample; the list is empty for a sample without columns."""
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

        Raises `LeaseLost` if a sample was cleared because its group has ended.
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
        # The bus assigns samples to tasks. So the request gives indexes, and does not use a sampler of the library.
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
        """Frees samples by key. Clearing a key again never frees a later sample with the same index."""
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
    """Returns columns → positions of samples with these columns, because a request needs samples of equal columns."""
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


class _Host:
    _title: str
    _server: Any

    async def describe(self) -> bytes:
        """Returns the `Server` as msgpack."""
        info = self._server.get_zmq_server_info()
        server = Server(title=self._title, pid=os.getpid(), server_id=info.id, folder=info.ip, ports=info.ports)
        return msgspec.msgpack.encode(server)

    async def stay(self) -> None:
        """Never returns. The call fails as soon as this process dies, and the caller detects the death."""
        await asyncio.Event().wait()


class StorageHost(_Host):
    """Runs one storage unit. Its memory has no limit, because admission already limits the number of groups."""

    def __init__(self, folder: str, number: int) -> None:
        serve_below(Path(folder))
        from transfer_queue.storage.simple_storage import SimpleStorageUnit

        self._title = f"storage unit {number} of TransferQueue"
        self._server = _plain(SimpleStorageUnit)({"total_storage_size": None, "num_data_storage_units": 1})


class ControllerHost(_Host):
    """Runs TransferQueue's controller, and frees samples for the bus process, which must not import torch."""

    def __init__(self, folder: str) -> None:
        serve_below(Path(folder))
        from transfer_queue.controller import TransferQueueController

        self._title = "the controller of TransferQueue"
        # Without polling_mode, a request for samples that do not exist yet blocks all other requests.
        self._server = _plain(TransferQueueController)(polling_mode=True)
        self._client: PlaneClient | None = None

    async def attach(self, address: bytes) -> None:
        """Connects the client to the data plane; its address is a `PlaneAddress` as msgpack."""
        plane = msgspec.msgpack.decode(address, type=PlaneAddress)
        self._client = await asyncio.to_thread(PlaneClient, plane)

    async def keys(self, partition: str, timeout_s: float) -> list[str]:
        """Returns every key of the partition."""
        assert self._client is not None
        return await self._client.call(self._client.keys(partition), timeout_s=timeout_s, what="a list of keys")

    async def clear(self, partition: str, keys: list[str], timeout_s: float) -> None:
        """Frees samples; skips samples that are already freed."""
        assert self._client is not None
        await self._client.call(self._client.clear(partition, keys), timeout_s=timeout_s, what="a clear")


def _plain(actor_class: Any) -> Any:
    """Returns the class inside Ray's decorator: our actors create an instance of it and have other options."""
    return actor_class.__ray_metadata__.modified_class


START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 2.0


class DataPlane:
    """Starts TransferQueue's controller and storage as Ray actors, which end with their creator or by `close`.

    Several buses may share one data plane; each bus has a separate partition. All processes run on one host and have
    their sockets in a new folder below ``folder``. Raises ValueError on a cluster with several nodes.
    """

    def __init__(self, *, folder: Path) -> None:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if nodes > 1:
            raise ValueError(f"bus=transfer_queue works within one host, this cluster has {nodes}: use bus=ray")
        self._folder = Path(tempfile.mkdtemp(prefix="tq-", dir=folder))  # 0700
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000}
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        host: Any = ray.remote(ControllerHost).options(**options)
        controller = host.remote(self._server_folder("controller"))
        unit: Any = ray.remote(StorageHost).options(**options)
        self.hosts: list[Any] = [controller, unit.remote(self._server_folder("unit0"), 0)]
        answers = ray.get([host.describe.remote() for host in self.hosts], timeout=START_TIMEOUT_S)
        servers = [msgspec.msgpack.decode(answer, type=Server) for answer in answers]
        self.address = PlaneAddress(controller=servers[0], units=servers[1:])
        ray.get(controller.attach.remote(msgspec.msgpack.encode(self.address)), timeout=START_TIMEOUT_S)

    def _server_folder(self, name: str) -> str:
        folder = self._folder / name
        folder.mkdir()
        return str(folder)

    def close(self) -> None:
        """Ends all processes and waits for their exit.

        A stopped process (SIGSTOP) does not react to Ray, so remaining processes are killed with SIGKILL.
        """
        for host in self.hosts:
            ray.kill(host)
        for pid in self._left_after(END_TIMEOUT_S):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = self._left_after(END_TIMEOUT_S)
        assert not left, f"these processes do not end: {left}"
        self._remove_folder()

    def _left_after(self, timeout_s: float) -> list[int]:
        """Waits up to ``timeout_s`` seconds for all processes to exit; returns the ids of the remaining processes."""
        deadline = time.monotonic() + timeout_s
        while left := [server.pid for server in self.address.servers if psutil.pid_exists(server.pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return left

"""The bus with payloads in TransferQueue (bus=transfer_queue): its client and its process.

The client stores a group's payloads in the data plane and sends their location to the bus process. Only the payloads
that the ledger persists are sent to the bus process itself. A lease contains the location, and the client reads the
payloads from there. The bus process frees the payloads of groups that have ended. If a server of the data plane exits,
all calls raise `BusLost` and the run ends. The client implements `relax_core.contracts.bus.Bus`.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from relax_core.bus.bus_actor import BusActor, answers
from relax_core.bus.ray_bus import RayBus, encode, get
from relax_core.bus.settings import BusSettings
from relax_core.bus.transfer_queue_plane import (
    DataPlane,
    LeaseMessage,
    NewSample,
    PayloadLocation,
    PlaneClient,
    PutMessage,
    StoredColumns,
    WriteMessage,
    abandoned,
)
from relax_core.contracts.bus import BusLost, Group, Lease, LeaseRequest
from relax_core.contracts.columns import PERSISTED_COLUMNS, media_sizes

STUCK_S = 60.0  # maximum duration of a call to a server; a longer call means that the server is stuck

_lease_decoder = msgspec.msgpack.Decoder(LeaseMessage | None)
Columns = Mapping[str, bytes]


class TransferQueueBus(RayBus):
    """Connects a process to the bus. ``owned``: the data plane that ends with the bus, set only in the creator."""

    def __init__(
        self, actor: Any, *, settings: BusSettings, location: PayloadLocation, owned: DataPlane | None = None
    ) -> None:
        super().__init__(actor, settings=settings)
        self.location = location
        self._owned = owned
        self._client: PlaneClient | None = None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._actor, self.settings, self.location)

    def open(self) -> PlaneClient:
        """Returns the client of the data plane.

        The first call imports the library and connects; this takes seconds.
        """
        with self._opening:
            if self._client is None:
                self._client = PlaneClient(self.location.plane, inline_bytes=self.settings.inline_bytes)
            return self._client

    # -- calls that store payloads ------------------------------------------------------------------------------
    async def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        samples = [NewSample.of(group.group_uid, group.columns, timeout_s=timeout_s) for group in groups]
        stored = await self._store(samples, timeout_s=timeout_s)
        await self._call("put", _pack_groups(groups, stored), timeout_s=_left_s(deadline))

    async def write(
        self,
        lease_id: int,
        columns: Mapping[str, Columns],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        deadline = time.monotonic() + timeout_s
        samples = [NewSample.of(uid, group, timeout_s=timeout_s) for uid, group in columns.items()]
        stored = await self._store(samples, timeout_s=timeout_s)
        written = {uid: (_kept(group), samples) for (uid, group), samples in zip(columns.items(), stored, strict=True)}
        request = encode(then) if then else None
        left_s = _left_s(deadline)
        return await self._call_for_lease("write", lease_id, encode(written), request, left_s, timeout_s=left_s)

    async def _store(self, samples: Sequence[NewSample], *, timeout_s: float) -> list[list[StoredColumns]]:
        client = await self._opened()
        request = client.put(self.location.partition, samples)
        return await client.call(request, timeout_s=min(timeout_s, STUCK_S), what="a put")

    async def _opened(self) -> PlaneClient:
        return await asyncio.to_thread(self.open) if self._client is None else self._client

    # -- calls that read payloads -------------------------------------------------------------------------------
    async def _call_for_lease(self, method: str, *args: Any, timeout_s: float) -> Lease | None:
        message = _lease_decoder.decode(await self._call(method, *args, timeout_s=timeout_s))
        if message is None:
            return None
        lease, stored = message
        wanted = [sample for samples in stored for sample in samples]
        client = await self._opened()
        request = client.get(self.location.partition, wanted)
        found = await client.call(request, timeout_s=STUCK_S, what=f"the payloads of a {method}")
        payloads = {sample.key: group for sample, group in zip(wanted, found, strict=True)}
        groups = [_joined(group, samples, payloads) for group, samples in zip(lease.rows, stored, strict=True)]
        return msgspec.structs.replace(lease, rows=groups)

    def terminate(self) -> None:
        """Ends the bus process and, if the bus owns it, the data plane."""
        super().terminate()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._owned is not None:
            self._owned.close()


def start_bus(
    settings: BusSettings,
    ledger_path: Path,
    *,
    options: dict[str, Any],
    plane: DataPlane,
    owned: DataPlane | None,
    timeout_s: float,
) -> TransferQueueBus:
    """Starts the bus process with a data plane. ``options`` are Ray's actor options, including name and namespace."""
    location = PayloadLocation(plane.address, f"{options['namespace']}/{options['name']}")
    remote = ray.remote(TransferQueueBusActor).options(**options)
    actor: Any = remote.remote(encode(settings), str(ledger_path), encode(location), plane.hosts)
    get(actor.watch.remote(), timeout_s=timeout_s, what="watch")
    return TransferQueueBus(actor, settings=settings, location=location, owned=owned)


def _reopen(actor: Any, settings: BusSettings, location: PayloadLocation) -> TransferQueueBus:
    return TransferQueueBus(actor, settings=settings, location=location)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _kept(columns: Columns) -> dict[str, bytes]:
    return {column: payload for column, payload in columns.items() if column in PERSISTED_COLUMNS}


def _pack_groups(groups: Sequence[Group], stored: Sequence[list[StoredColumns]]) -> bytes:
    kept = [
        msgspec.structs.replace(group, columns=_kept(group.columns), media=media_sizes(group.columns))
        for group in groups
    ]
    return encode(list(zip(kept, stored, strict=True)))


def _joined(group: Group, stored: Sequence[StoredColumns], payloads: Mapping[str, Columns]) -> Group:
    columns = dict(group.columns)
    for stored_columns in stored:
        columns |= payloads[stored_columns.key]
    return msgspec.structs.replace(group, columns=columns)


SWEEP_S = 30.0  # interval between two searches for samples of dead writers
TIDY_TIMEOUT_S = 60.0

_groups_decoder = msgspec.msgpack.Decoder(PutMessage)
_columns_decoder = msgspec.msgpack.Decoder(WriteMessage)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Sample:
    key: str
    index: int


@dataclass(frozen=True, slots=True)
class _StoredPayload:
    sample: _Sample
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


class TransferQueueBusActor(BusActor):
    """Runs the bus process with a data plane.

    ``location`` is a `PayloadLocation` as msgpack. ``hosts`` are the Ray actors of the data plane, in the order of
    `PlaneAddress.servers`.
    """

    def __init__(self, settings: bytes, ledger_path: str, location: bytes, hosts: list[Any]) -> None:
        super().__init__(settings, ledger_path)
        self._location = msgspec.msgpack.decode(location, type=PayloadLocation)
        self._hosts = hosts
        self._known: weakref.WeakValueDictionary[str, _Sample] = weakref.WeakValueDictionary()
        self._freed: list[str] = []
        self._something_freed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def watch(self) -> None:
        """Starts the background tasks that watch the data plane's processes and free samples."""
        loops = [
            self._watch(server.title, host)
            for server, host in zip(self._location.plane.servers, self._hosts, strict=True)
        ]
        self._tasks = [asyncio.create_task(loop) for loop in (*loops, self._clear_freed(), self._keep_sweeping())]

    @answers
    async def put(self, body: bytes) -> None:
        """Adds complete groups; the client has already stored their payloads."""
        given = _groups_decoder.decode(body)
        self._core.put(
            [
                msgspec.structs.replace(group, columns={**group.columns, **self._payloads(stored)})
                for group, stored in given
            ]
        )
        self._changed()

    @answers
    async def write(self, lease_id: int, body: bytes, then: bytes | None, timeout_s: float) -> Any:
        """Adds columns and ends the lease; the client has already stored the payloads."""
        written = {
            uid: {**columns, **self._payloads(stored)}
            for uid, (columns, stored) in _columns_decoder.decode(body).items()
        }
        self._core.write(lease_id, cast(Mapping[str, Mapping[str, bytes]], written))
        self._changed()
        return (
            await self._lease(then, timeout_s, after=f"the write of lease {lease_id} is recorded; ") if then else None
        )

    async def describe(self) -> tuple[int, bytes, bytes]:
        """Returns (process id, settings, location of the payloads). Settings and location are msgpack."""
        process_id, settings, _ = await super().describe()
        return process_id, settings, encode(self._location)

    def _payloads(self, stored: list[StoredColumns]) -> dict[str, Any]:
        payloads: dict[str, Any] = {}
        for stored_columns in stored:
            sample = _Sample(stored_columns.key, stored_columns.index)
            self._known[stored_columns.key] = sample
            weakref.finalize(sample, self._free, stored_columns.key).atexit = False
            payloads |= {column: _StoredPayload(sample, nbytes) for column, nbytes in stored_columns.sizes.items()}
        return payloads

    def pack_lease(self, lease: Lease) -> tuple[Any, tuple[Any, ...]]:
        """Returns the lease with the locations of its payloads. The client fetches the payloads."""
        groups, samples = [], []
        for group in lease.rows:
            inline: dict[str, bytes] = {}
            stored: dict[str, StoredColumns] = {}
            for column, payload in cast(Mapping[str, bytes | _StoredPayload], group.columns).items():
                if isinstance(payload, _StoredPayload):
                    sample = payload.sample
                    stored_columns = stored.setdefault(sample.key, StoredColumns(sample.key, sample.index, {}))
                    stored_columns.sizes[column] = payload.nbytes
                else:
                    inline[column] = payload
            groups.append(msgspec.structs.replace(group, columns=inline))
            samples.append(list(stored.values()))
        return (msgspec.structs.replace(lease, rows=groups), samples), ()

    # -- the data plane -----------------------------------------------------------------------------------------
    async def _watch(self, title: str, host: Any) -> None:
        """Waits until a process of the data plane exits, then reports the loss.

        The loss of a single process loses all groups, because each group's payloads are spread over the storage units.
        """
        try:
            await host.stay.remote()
        except RayActorError as error:
            self._lose(f"{title} has exited: {str(error).splitlines()[0]}")

    def _free(self, key: str) -> None:
        self._freed.append(key)
        self._something_freed.set()

    async def _clear_freed(self) -> None:
        while True:
            await self._something_freed.wait()
            self._something_freed.clear()
            keys, self._freed = self._freed, []
            await self._tidy(self._hosts[0].clear, keys)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Frees samples of writers that died before they reported the samples to the bus."""
        for key in abandoned(await self._tidy(self._hosts[0].keys), self._known, now=time.time()):
            self._free(key)

    async def _tidy(self, method: Any, *args: Any) -> Any:
        """Calls a method of the controller. If the call fails, the data plane is lost and `_tidy` never returns."""
        try:
            return await method.remote(self._location.partition, *args, TIDY_TIMEOUT_S)
        except RayActorError:
            pass  # `_watch` reports the loss.
        except RayTaskError as error:
            self._lose(str(error.cause))
        await asyncio.Event().wait()

    def _lose(self, text: str) -> None:
        """Makes all waiting and later calls raise `BusLost`, because stored payloads can no longer be read."""
        if self._lost is None and self._core.close_reason is None:
            self._lost = BusLost(text)
            self._waiting.fail_all(self._lost)

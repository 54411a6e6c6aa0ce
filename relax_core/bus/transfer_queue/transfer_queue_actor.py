"""The bus process when TransferQueue stores the payloads: it keeps the state and decides which samples may be freed.

A payload in the core's state is a reference to a column of a TransferQueue sample. When the last reference to a sample
is deleted, because its group ended or its group was refused or came twice, the sample is cleared.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from ray.exceptions import RayActorError, RayTaskError

from relax_core.bus.ray.bus_actor import BusActor, answers
from relax_core.bus.ray.payload_blocks import encode
from relax_core.bus.transfer_queue.messages import (
    PayloadLocation,
    PutMessage,
    StoredColumns,
    WriteMessage,
    abandoned,
)
from relax_core.contracts.bus import BusLost, Lease

SWEEP_S = 30.0  # interval of the search for samples whose writers died
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
    """Is the bus process over a data plane.

    ``location`` is a `PayloadLocation` as msgpack. ``hosts`` are the actors of the data plane, in the order of its
    servers.
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
        """Starts the tasks that watch the data plane's processes and free samples."""
        loops = [
            self._watch(server.title, host)
            for server, host in zip(self._location.plane.servers, self._hosts, strict=True)
        ]
        self._tasks = [asyncio.create_task(loop) for loop in (*loops, self._clear_freed(), self._keep_sweeping())]

    @answers
    async def put(self, body: bytes) -> None:
        """Enters complete groups whose payloads are stored already."""
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
        """Adds columns whose payloads are stored already, and ends the lease."""
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
        """Returns (process id, settings, location of the payloads), the last two as msgpack."""
        process_id, settings, _ = await super().describe()
        return process_id, settings, encode(self._location)

    def _payloads(self, stored: list[StoredColumns]) -> dict[str, Any]:
        payloads: dict[str, Any] = {}
        for one in stored:
            sample = _Sample(one.key, one.index)
            self._known[one.key] = sample
            weakref.finalize(sample, self._free, one.key).atexit = False
            payloads |= {column: _StoredPayload(sample, nbytes) for column, nbytes in one.sizes.items()}
        return payloads

    def pack_lease(self, lease: Lease) -> tuple[Any, tuple[Any, ...]]:
        """Returns the lease with the location of its payloads, which the client fetches."""
        groups, samples = [], []
        for group in lease.rows:
            inline: dict[str, bytes] = {}
            stored: dict[str, StoredColumns] = {}
            for column, payload in cast(Mapping[str, bytes | _StoredPayload], group.columns).items():
                if isinstance(payload, _StoredPayload):
                    sample = payload.sample
                    one = stored.setdefault(sample.key, StoredColumns(sample.key, sample.index, {}))
                    one.sizes[column] = payload.nbytes
                else:
                    inline[column] = payload
            groups.append(msgspec.structs.replace(group, columns=inline))
            samples.append(list(stored.values()))
        return (msgspec.structs.replace(lease, rows=groups), samples), ()

    # -- the data plane -----------------------------------------------------------------------------------------
    async def _watch(self, title: str, host: Any) -> None:
        """Waits until a process of the data plane exits.

        All payloads are lost then, because each group's payloads are spread over the units.
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
        """Frees the samples of writers that died before they reported them to the bus."""
        for key in abandoned(await self._tidy(self._hosts[0].keys), self._known, now=time.time()):
            self._free(key)

    async def _tidy(self, method: Any, *args: Any) -> Any:
        """Calls a method of the controller. If it fails, the data plane is lost and this coroutine never returns."""
        try:
            return await method.remote(self._location.partition, *args, TIDY_TIMEOUT_S)
        except RayActorError:
            pass  # `_watch` reports the loss.
        except RayTaskError as error:
            self._lose(str(error.cause))
        await asyncio.Event().wait()

    def _lose(self, text: str) -> None:
        """Makes all waiting and later calls raise `BusLost`, because the stored payloads cannot be read any more."""
        if self._lost is None and self._core.closed_because is None:
            self._lost = BusLost(text)
            self._waiting.fail_all(self._lost)

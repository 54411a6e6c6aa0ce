"""`TransferQueueBus`: the client of a bus whose payloads TransferQueue stores. See `relax_core.contracts.bus.Bus`.

The client stores a group's payloads itself and reports their location to the bus process. A lease names the location
from which the client reads them. Only the columns that the ledger persists travel to the bus process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from relax_core.bus.ray.payload_blocks import encode
from relax_core.bus.ray.ray_bus import RayBus, get, open_answer
from relax_core.bus.state.settings import BusSettings
from relax_core.bus.transfer_queue.data_plane import START_TIMEOUT_S, DataPlane
from relax_core.bus.transfer_queue.data_plane_client import NewSample, PlaneClient
from relax_core.bus.transfer_queue.messages import (
    LeaseMessage,
    PayloadLocation,
    StoredColumns,
)
from relax_core.bus.transfer_queue.transfer_queue_actor import TransferQueueBusActor
from relax_core.contracts.bus import Group, Lease, LeaseRequest
from relax_core.contracts.columns import PERSISTED_COLUMNS, media_sizes

STUCK_S = 60.0  # a server counts as stuck if one call takes longer

_lease_decoder = msgspec.msgpack.Decoder(LeaseMessage | None)
Columns = Mapping[str, bytes]


class TransferQueueBus(RayBus):
    """Is the client of the bus. ``owned`` is the data plane that ends with this bus; only its creator has it."""

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

        The first call imports the library and connects, which takes seconds.
        """
        with self._opening:
            if self._client is None:
                self._client = PlaneClient(self.location.plane, inline_bytes=self.settings.inline_bytes)
            return self._client

    # -- calls that store payloads ------------------------------------------------------------------------------
    def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        """Stores the payloads, then enters the groups."""
        deadline = time.monotonic() + timeout_s
        samples = [NewSample.of(group.group_uid, group.columns, timeout_s=timeout_s) for group in groups]
        stored = self._store(samples, timeout_s=timeout_s)
        self._call("put", _pack_groups(groups, stored), timeout_s=_left_s(deadline))

    async def put_async(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        """Stores the payloads, then enters the groups."""
        deadline = time.monotonic() + timeout_s
        samples = [NewSample.of(group.group_uid, group.columns, timeout_s=timeout_s) for group in groups]
        client = await asyncio.to_thread(self.open)
        request = client.put(self.location.partition, samples)
        stored = await client.call_async(request, timeout_s=min(timeout_s, STUCK_S), what="a put")
        await self._call_async("put", _pack_groups(groups, stored), timeout_s=_left_s(deadline))

    def write(
        self,
        lease_id: int,
        columns: Mapping[str, Columns],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Stores the payloads, then writes the columns."""
        deadline = time.monotonic() + timeout_s
        samples = [NewSample.of(uid, group, timeout_s=timeout_s) for uid, group in columns.items()]
        stored = self._store(samples, timeout_s=timeout_s)
        written = {uid: (_kept(group), samples) for (uid, group), samples in zip(columns.items(), stored, strict=True)}
        request = encode(then) if then else None
        left_s = _left_s(deadline)
        return self._call_for_lease("write", lease_id, encode(written), request, left_s, timeout_s=left_s)

    def _store(self, samples: Sequence[NewSample], *, timeout_s: float) -> list[list[StoredColumns]]:
        client = self.open()
        request = client.put(self.location.partition, samples)
        return client.call(request, timeout_s=min(timeout_s, STUCK_S), what="a put")

    # -- calls that read payloads -------------------------------------------------------------------------------
    def _call_for_lease(self, method: str, *args: Any, timeout_s: float) -> Lease | None:
        answer = get(getattr(self._actor, method).remote(*args), timeout_s=timeout_s, what=method)
        message = _lease_decoder.decode(open_answer(answer)[0])
        if message is None:
            return None
        lease, stored = message
        wanted = [one for samples in stored for one in samples]
        client = self.open()
        request = client.get(self.location.partition, wanted)
        found = client.call(request, timeout_s=STUCK_S, what=f"the payloads of a {method}")
        payloads = {one.key: group for one, group in zip(wanted, found, strict=True)}
        groups = [_joined(group, samples, payloads) for group, samples in zip(lease.rows, stored, strict=True)]
        return msgspec.structs.replace(lease, rows=groups)

    def terminate(self) -> None:
        """Ends the bus process, and the data plane if this bus owns it."""
        super().terminate()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._owned is not None:
            self._owned.close()


def start_bus(
    settings: BusSettings, ledger_path: Path, *, options: dict[str, Any], plane: DataPlane, owned: DataPlane | None
) -> TransferQueueBus:
    """Starts the bus process over a data plane. ``options`` are Ray's and contain name and namespace."""
    location = PayloadLocation(plane.address, f"{options['namespace']}/{options['name']}")
    remote = ray.remote(TransferQueueBusActor).options(**options)
    actor: Any = remote.remote(encode(settings), str(ledger_path), encode(location), plane.hosts)
    get(actor.watch.remote(), timeout_s=START_TIMEOUT_S, what="watch")
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
    for one in stored:
        columns |= payloads[one.key]
    return msgspec.structs.replace(group, columns=columns)

"""The processes of TransferQueue: Ray actors that hold one server each. They import torch, because the library does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from relax_core.bus.transfer_queue.data_plane_client import PlaneClient
from relax_core.bus.transfer_queue.messages import PlaneAddress, Server
from relax_core.bus.transfer_queue.sockets import serve_below


class _Host:
    _title: str
    _server: Any

    async def describe(self) -> bytes:
        """Returns the `Server` as msgpack."""
        info = self._server.get_zmq_server_info()
        server = Server(title=self._title, pid=os.getpid(), server_id=info.id, folder=info.ip, ports=info.ports)
        return msgspec.msgpack.encode(server)

    async def stay(self) -> None:
        """Never returns. The call fails as soon as this process dies, so a caller learns of it."""
        await asyncio.Event().wait()


class StorageHost(_Host):
    """Is one storage unit. It holds payloads in memory without a limit, because admission bounds the groups."""

    def __init__(self, folder: str, number: int) -> None:
        serve_below(Path(folder))
        from transfer_queue.storage.simple_storage import SimpleStorageUnit

        self._title = f"storage unit {number} of TransferQueue"
        self._server = _plain(SimpleStorageUnit)({"total_storage_size": None, "num_data_storage_units": 1})


class ControllerHost(_Host):
    """Is TransferQueue's controller, with a client that frees samples for the bus process, which imports no torch."""

    def __init__(self, folder: str) -> None:
        serve_below(Path(folder))
        from transfer_queue.controller import TransferQueueController

        self._title = "the controller of TransferQueue"
        # Without polling_mode, one request for samples that are not there yet blocks every other request.
        self._server = _plain(TransferQueueController)(polling_mode=True)
        self._client: PlaneClient | None = None

    async def attach(self, address: bytes) -> None:
        """Connects the client to the data plane, a `PlaneAddress` as msgpack."""
        plane = msgspec.msgpack.decode(address, type=PlaneAddress)
        self._client = await asyncio.to_thread(PlaneClient, plane)

    async def keys(self, partition: str, timeout_s: float) -> list[str]:
        """Returns every key of the partition."""
        assert self._client is not None
        return await self._client.call_async(self._client.keys(partition), timeout_s=timeout_s, what="a list of keys")

    async def clear(self, partition: str, keys: list[str], timeout_s: float) -> None:
        """Frees these samples and skips those that were freed before."""
        assert self._client is not None
        await self._client.call_async(self._client.clear(partition, keys), timeout_s=timeout_s, what="a clear")


def _plain(actor_class: Any) -> Any:
    """Returns the class below Ray's decorator, so that our actors can hold its object with their own options."""
    return actor_class.__ray_metadata__.modified_class

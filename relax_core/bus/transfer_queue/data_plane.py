"""Starts and ends the processes of TransferQueue, which store the payloads of a bus."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray

from relax_core.bus.transfer_queue.messages import PlaneAddress, Server
from relax_core.bus.transfer_queue.server_actors import ControllerHost, StorageHost

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 2.0


class DataPlane:
    """Is transferQueue's controller and its storage units, as Ray actors that end with their creator or by `close`.

    Several buses may share one data plane; each has a partition of its own. All processes run on one host, and their
    sockets lie in a new folder below ``folder``. Raises ValueError on a cluster of several nodes.
    """

    def __init__(self, *, storage_units: int, folder: Path) -> None:
        nodes = sum(node["Alive"] for node in ray.nodes())
        if nodes > 1:
            raise ValueError(f"bus=transfer_queue works within one host, this cluster has {nodes}: use bus=ray")
        self._folder = Path(tempfile.mkdtemp(prefix="tq-", dir=folder))  # 0700
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000}
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        host: Any = ray.remote(ControllerHost).options(**options)
        controller = host.remote(self._server_folder("controller"))
        unit: Any = ray.remote(StorageHost).options(**options)
        units = [unit.remote(self._server_folder(f"unit{number}"), number) for number in range(storage_units)]
        self.hosts: list[Any] = [controller, *units]
        answers = ray.get([host.describe.remote() for host in self.hosts], timeout=START_TIMEOUT_S)
        servers = [msgspec.msgpack.decode(answer, type=Server) for answer in answers]
        self.address = PlaneAddress(controller=servers[0], units=servers[1:])
        ray.get(controller.attach.remote(msgspec.msgpack.encode(self.address)), timeout=START_TIMEOUT_S)

    def _server_folder(self, name: str) -> str:
        folder = self._folder / name
        folder.mkdir()
        return str(folder)

    def close(self) -> None:
        """Ends every process and returns when all have exited.

        A stopped process does not react to Ray, so it is killed with SIGKILL.
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
        """Returns the ids of processes that still exist after ``timeout_s`` seconds; returns at once when none does."""
        deadline = time.monotonic() + timeout_s
        while left := [server.pid for server in self.address.servers if psutil.pid_exists(server.pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return left

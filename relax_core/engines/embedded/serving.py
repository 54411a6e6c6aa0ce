"""Serves the application until it is told to stop, or until the decode thread dies."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn

from relax_core.engines.embedded.scheduler import Scheduler
from relax_core.engines.embedded.server import EngineApp

KEEP_ALIVE_S = 7 * 24 * 3600  # a client may be silent for a whole train step, however long
GRACE_S = 1  # for open requests, when told to stop
WATCH_S = 0.2


class _Server(uvicorn.Server):
    """Says that it is ready once it listens."""

    def __init__(self, config: uvicorn.Config, *, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self._ready, flush=True)


async def serve(app: EngineApp, scheduler: Scheduler, listener: socket.socket, *, ready: str) -> None:
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, ready=ready)
    watcher = asyncio.create_task(_end_with_decode_thread(scheduler))
    await server.serve(sockets=[listener])
    watcher.cancel()


async def _end_with_decode_thread(scheduler: Scheduler) -> None:
    """A decode thread that died cannot be mended: the process ends and its owner starts another."""
    while scheduler.is_alive():
        await asyncio.sleep(WATCH_S)
    print(f"embedded engine: the decode thread died: {scheduler.failure!r}", file=sys.stderr, flush=True)
    os._exit(1)

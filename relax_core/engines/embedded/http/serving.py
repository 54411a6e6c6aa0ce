"""Serves the application until it is told to stop, or until the decode thread dies."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from typing import cast

import uvicorn

from relax_core.engines.embedded.http.application import EngineApp
from relax_core.engines.embedded.http.connections import BACKLOG, Connection, Places, connection_limit
from relax_core.engines.embedded.scheduler.scheduler import Scheduler

KEEP_ALIVE_S = 7 * 24 * 3600  # a client that knows the token may be silent for a whole train step, however long
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
    places = Places(connection_limit())
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Connection, places)),
        ws="none",
        lifespan="off",
        log_level="error",  # what a client does wrong is told to the client
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, ready=ready)
    beside = [asyncio.create_task(_end_with_decode_thread(scheduler)), asyncio.create_task(places.sweep())]
    await server.serve(sockets=[listener])
    for task in beside:
        task.cancel()


async def _end_with_decode_thread(scheduler: Scheduler) -> None:
    """A decode thread that died cannot be mended: the process ends and its owner starts another."""
    while scheduler.is_alive():
        await asyncio.sleep(WATCH_S)
    print(f"embedded engine: the decode thread died: {scheduler.failure!r}", file=sys.stderr, flush=True)
    os._exit(1)

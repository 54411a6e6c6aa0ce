"""Serves the application until the process gets a signal to stop, or until the decode thread fails."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from typing import cast

import uvicorn

from relax_core.engines.embedded.http.application import EngineApp
from relax_core.engines.embedded.scheduler.scheduler import Scheduler
from relax_core.engines.http_server.connections import Connection, OpenConnections, connection_limit
from relax_core.engines.http_server.held_port import BACKLOG
from relax_core.engines.protocol.server_proof import ServerProof

KEEP_ALIVE_S = 7 * 24 * 3600  # a client with the token may be silent for a whole train step, however long it is
GRACE_S = 1  # seconds that open requests get to end when the server stops
POLL_S = 0.2


class _Server(uvicorn.Server):
    """Prints the ready line to stdout once the server listens."""

    def __init__(self, config: uvicorn.Config, *, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self._ready, flush=True)


async def serve(app: EngineApp, scheduler: Scheduler, listener: socket.socket, *, token: str, ready: str) -> None:
    """Serves ``app`` and the proof of ``token`` on the socket ``listener``; prints ``ready`` once it listens."""
    connections = OpenConnections(connection_limit())
    config = uvicorn.Config(
        ServerProof(app, token=token),
        http=cast("type[asyncio.Protocol]", partial(Connection, connections)),
        ws="none",
        lifespan="off",
        log_level="error",  # a client's mistakes are answered to the client and not logged
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, ready=ready)
    tasks = [asyncio.create_task(_end_with_decode_thread(scheduler)), asyncio.create_task(connections.sweep())]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


async def _end_with_decode_thread(scheduler: Scheduler) -> None:
    """Ends the process when the decode thread has failed, because only a new process can decode again."""
    while scheduler.is_alive():
        await asyncio.sleep(POLL_S)
    print(f"embedded engine: the decode thread failed: {scheduler.failure!r}", file=sys.stderr, flush=True)
    os._exit(1)

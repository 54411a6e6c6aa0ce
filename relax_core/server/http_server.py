"""Serves an ASGI application on a bound socket, with the connection limits of every HTTP server of Relax."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from relax_core.engines.asgi_server import Connection, OpenConnections, connection_limit
from relax_core.engines.held_port import BACKLOG

KEEP_ALIVE_S = 30
GRACE_S = 1  # time in seconds for open requests to end when the server stops


class HttpServer:
    """Serves ``app`` until `stop` is called or, with ``signals``, until Ctrl-C."""

    def __init__(self, app: ASGIApp, *, signals: bool = True) -> None:
        self._connections = OpenConnections(connection_limit())
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(Connection, self._connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # errors of a client or a run's folder are sent to the client, not logged
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config) if signals else _WithoutSignals(config)

    @property
    def started(self) -> bool:
        """Returns whether the server accepts requests."""
        return self._server.started

    async def serve(self, listener: socket.socket) -> None:
        """Serves the bound socket ``listener``. Returns after the server has ended."""
        sweeping = asyncio.create_task(self._connections.sweep())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            sweeping.cancel()

    def stop(self) -> None:
        """Ends the server. Any thread may call this method."""
        self._server.should_exit = True


class _WithoutSignals(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers, because the supervisor handles signals."""
        yield

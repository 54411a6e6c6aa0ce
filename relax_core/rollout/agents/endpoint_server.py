"""Serves the endpoint on a port of this host, in the event loop of the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import uvicorn

from relax_core.engines.http_server.connections import Connection, OpenConnections, connection_limit
from relax_core.engines.http_server.held_port import BACKLOG, listening_socket

if TYPE_CHECKING:
    from relax_core.rollout.agents.endpoint_app import EndpointApp

KEEP_ALIVE_S = 600  # an agent may think or run tools between two requests
GRACE_S = 1  # seconds that open requests get to end when the server stops
POLL_S = 0.01


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process that the server runs in."""
        yield


@asynccontextmanager
async def served(app: EndpointApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serves ``app`` while the context is open; gives the base URL. Port 0 takes any free one.

    Raises OSError if the address cannot be taken.
    """
    connections = OpenConnections(connection_limit())
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Connection, connections)),
        ws="none",
        lifespan="off",
        log_config=None,  # the process has its own log, and no key of a client belongs there
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    listener = listening_socket(host, port)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(connections.sweep())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        sweeping.cancel()
        await asyncio.wait([serving], timeout=GRACE_S + 5.0)
        listener.close()

"""Serves the gateway from a socket of the supervisor, and writes its address into ``gateway.json`` of the run."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import uvicorn

from relax_core.engines.http_server.connections import Connection, OpenConnections, connection_limit
from relax_core.engines.http_server.held_port import BACKLOG, url_of
from relax_core.engines.protocol.server_proof import ServerProof
from relax_core.server.gateway_settings import FILE, GatewayAddress, GatewaySettings
from relax_core.server.guard import Guard
from relax_core.server.order_routes import Controller, order_app
from relax_core.server.run_page import RunPage

KEEP_ALIVE_S = 30
GRACE_S = 1  # seconds that open requests get when the gateway ends


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the supervisor."""
        yield


def write_address(folder: Path, address: GatewayAddress) -> None:
    """Writes ``gateway.json``, which appears as a whole and is never readable by others."""
    partial_file = folder / f".{FILE}.partial"
    partial_file.unlink(missing_ok=True)
    descriptor = os.open(partial_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    os.replace(partial_file, folder / FILE)


async def serve(settings: GatewaySettings) -> None:
    """Serves until standard input is closed. The first line on standard output is the address, in JSON."""
    folder = Path(settings.folder)
    listener = socket.socket(fileno=settings.listener)
    port = listener.getsockname()[1]
    connections = OpenConnections(connection_limit())
    address = GatewayAddress(url=url_of(listener), token=settings.token, page="", pid=os.getpid())

    def tell_link(link: str) -> None:
        nonlocal address
        address = msgspec.structs.replace(address, page=link)
        write_address(folder, address)

    channel = socket.socket(fileno=settings.channel)
    channel.setblocking(False)
    app = order_app(Controller(channel, folder), settings.limits)
    routes = Guard(app, token=settings.token, hosts=settings.hosts)
    page = RunPage(routes, settings, port=port, tell_link=tell_link)
    server = _Server(
        uvicorn.Config(
            ServerProof(page, token=settings.token),
            http=cast("type[asyncio.Protocol]", partial(Connection, connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(connections.sweep())
    print(msgspec.json.encode(address).decode(), flush=True)
    closed = asyncio.create_task(_closed_stdin())
    await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (sweeping, closed):
        task.cancel()
    ended, _ = await asyncio.wait({serving}, timeout=GRACE_S + 1.0)
    page.close()
    for task in ended:
        task.result()  # a server that failed ends the process with its error


async def _closed_stdin() -> None:
    """Returns when the supervisor has closed standard input, without a thread that would outlive the server."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    while await reader.read(1024):
        pass

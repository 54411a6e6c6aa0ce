"""Runs the gateway of one run: ``python -m relax_core.server.gateway_server``, with JSON settings on stdin.

The gateway serves the page of the run and the routes for orders. It inherits its listening socket from the supervisor,
and writes its address to ``gateway.json`` in the run's folder. It exits when its stdin closes, which happens at the end
of the supervisor.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from relax_core.engines.held_port import url_of
from relax_core.engines.protocol.server_proof import ServerProof
from relax_core.server.gateway_client import FILE, GatewayAddress, GatewaySettings
from relax_core.server.http_server import GRACE_S, HttpServer
from relax_core.server.order_routes import Controller, order_app
from relax_core.server.page_routes import Page
from relax_core.server.request_guard import RequestGuard, Session
from relax_core.server.run_reader import cache_folder

INDICES = "gateway"  # in the cache folder, separate from the index of `relax dashboard`


def write_address(folder: Path, address: GatewayAddress) -> None:
    """Writes ``gateway.json`` atomically. Other users can never read the file."""
    partial_file = folder / f".{FILE}.partial"
    partial_file.unlink(missing_ok=True)
    descriptor = os.open(partial_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))
    os.replace(partial_file, folder / FILE)


async def serve(settings: GatewaySettings) -> None:
    """Serves until stdin closes. The first line on stdout is the address, in JSON.

    The session key of the page is derived from the run's token, so a restarted gateway accepts the same key.
    """
    folder = Path(settings.folder)
    listener, channel = socket.socket(fileno=settings.listener), socket.socket(fileno=settings.channel)
    channel.setblocking(False)
    port, url = listener.getsockname()[1], url_of(listener)
    session = Session(hashlib.blake2b(b"the page of the run", key=settings.token.encode()).hexdigest())

    def print_link() -> GatewayAddress:
        link = f"http://{settings.host}:{port}/#token={session.link_token}"
        address = GatewayAddress(url=url, token=settings.token, page=link, pid=os.getpid())
        write_address(folder, address)
        return address

    page = Page([folder], cache=cache_folder() / INDICES, session=session, on_exchange=print_link)
    app = order_app(Controller(channel, folder), settings.limits, pages=page.routes)
    guard = RequestGuard(app, session, port=lambda: port, names=settings.hosts, token=settings.token)
    server = HttpServer(ServerProof(guard, token=settings.token), signals=False)
    address = print_link()
    serving = asyncio.create_task(server.serve(listener))
    print(msgspec.json.encode(address).decode(), flush=True)
    closed = asyncio.create_task(_closed_stdin())
    await asyncio.wait({serving, closed}, return_when=asyncio.FIRST_COMPLETED)
    server.stop()
    closed.cancel()
    ended, _ = await asyncio.wait({serving}, timeout=GRACE_S + 1.0)
    page.close()
    for task in ended:
        task.result()  # an error of the server ends the process


async def _closed_stdin() -> None:
    """Returns when the supervisor has closed stdin. Uses no thread, because a thread could outlive the server."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    while await reader.read(1024):
        pass


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=GatewaySettings)))

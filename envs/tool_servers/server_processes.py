"""Starts and ends the programs of tool servers, and keeps the last output of each server."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from relax_core.contracts.child_process import Child

log = logging.getLogger(__name__)
PORT = "{port}"
_SHOWN = 800  # the last bytes of a server's output that an error shows
_POLL_S = 0.05


@dataclass(frozen=True)
class McpServer:
    """Holds the settings of one server.

    ``command`` is a program with its arguments, not a shell command; the first word "python" is replaced by this Python
    interpreter. Without ``url``, the program communicates over stdin and stdout, and each episode has a separate
    process. With ``url``, the program serves HTTP at this address, and each rollout worker has one process; "{port}" in
    ``command`` and ``url`` is replaced by a free port. With ``url`` and without ``command``, the server is external.
    The program starts in the folder ``cwd``; its environment has the variables ``env`` and a few standard variables.
    """

    command: str = ""
    url: str = ""
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict, repr=False)


class OutputTail:
    """Holds a pipe for the output of a server, and keeps the last `_SHOWN` bytes."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.file = os.fdopen(writer, "w")
        self._kept, self._closed = b"", False
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self._reader, 1 << 16):
                self._kept = (self._kept + part)[-_SHOWN:]

    def text(self) -> str:
        """Returns the kept output as text."""
        if not self._closed:
            self._read()
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Closes the pipe."""
        asyncio.get_running_loop().remove_reader(self._reader)
        self.file.close()
        self._read()
        self._closed = True
        os.close(self._reader)


def server_command(command: str) -> list[str]:
    """Splits a command into words; "python" becomes this Python interpreter. Raises ValueError for an open quote."""
    program, *arguments = shlex.split(command)
    return [sys.executable if program == "python" else program, *arguments]


@dataclass(eq=False, kw_only=True)
class _Running:
    """Holds the process of an HTTP server."""

    process: Child
    url: str
    output: OutputTail


class HttpServers:
    """Holds the HTTP servers of this process; starts a server on first use, and restarts a server that has ended."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def url(self, name: str, server: McpServer) -> str:
        """Returns the address of a running server; starts the server if needed."""
        key = json.dumps(asdict(server), sort_keys=True)
        async with self._locks.setdefault(key, asyncio.Lock()):
            running = self._running.get(key)
            if running is not None and (code := running.process.poll()) is not None:
                log.warning("the MCP server %s ended with %d and starts again: %s", name, code, running.output.text())
                running.output.close()
                running = None
            if running is None:
                running = self._running[key] = _started(server)
            await _until_it_listens(name, running)
            return running.url

    def kill(self) -> None:
        """Kills all servers with their child processes."""
        for running in self._running.values():
            running.process.kill()


def _started(server: McpServer) -> _Running:
    from mcp.client.stdio import get_default_environment

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    output = OutputTail()
    process = Child(
        server_command(server.command.replace(PORT, port)),
        name=f"the server {server.url}",
        log=output.file.fileno(),
        stdin=subprocess.DEVNULL,
        stdout=None,
        folder=server.cwd,
        environment=get_default_environment() | dict(server.env),
        with_parent=signal.SIGKILL,
    )
    return _Running(process=process, url=server.url.replace(PORT, port), output=output)


async def _until_it_listens(name: str, running: _Running) -> None:
    """Waits until a server accepts connections; the caller, which opens the session, has a deadline."""
    from urllib.parse import urlsplit

    where = urlsplit(running.url)
    while True:
        if (code := running.process.poll()) is not None:
            raise RuntimeError(f"the server {name} ended with {code}: {running.output.text()}")
        try:
            _, writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            await asyncio.sleep(_POLL_S)
            continue
        writer.close()
        return


HTTP_SERVERS = HttpServers()
atexit.register(HTTP_SERVERS.kill)

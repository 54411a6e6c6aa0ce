"""Holds sessions with servers of the Model Context Protocol, with the package `mcp`.

All sessions of the process run in a separate event loop in one thread. There are two reasons: the package must open and
close a session in the same task, and tools are also listed outside of the rollout's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from envs.tool_servers.server_processes import HTTP_SERVERS, McpServer, OutputTail, server_command
from relax_core.contracts.child_process import cause_in, ends_with_parent
from relax_core.contracts.host_network import is_loopback_url, proxy_description

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_HTTP_S, _HTTP_READ_S = 30.0, 300.0  # the default limits of a request in the package
_PING_S = 10.0  # a server that does not answer a ping within this time is lost
_CLOSE_S = 8.0  # the package waits 2 s for a server's exit, and then up to 4 s until it has ended the server


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of sessions; it runs in a thread until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="MCP sessions").start()
    return loop


def in_thread(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Runs ``work`` in the thread of sessions."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


class McpSessions:
    """Holds the sessions of one episode, one per server. The methods must run in the thread of sessions."""

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self._servers = servers
        self.clients: dict[str, Client] = {}
        self._outputs: dict[str, OutputTail] = {}
        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Opens the sessions. Raises RuntimeError if a server does not answer."""
        self._task = asyncio.create_task(self._hold())
        opened = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait([self._task, opened], return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if self._task.done():
            name = next((server for server in self._servers if server not in self.clients), "")
            raise RuntimeError(f"the server {name} opens no session: {self._why(name, self._task.exception())}")

    async def _hold(self) -> None:
        """Opens and closes the sessions in one task, as the package requires."""
        try:
            async with AsyncExitStack() as stack:
                for name, server in self._servers.items():
                    self._outputs[name] = OutputTail()
                    client = await _client(name, server, self._outputs[name], stack)
                    self.clients[name] = await stack.enter_async_context(client)
                self._opened.set()
                await self._closing.wait()
        finally:
            for output in self._outputs.values():
                output.close()

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Calls a tool. Returns if it failed, and the text for the model. Raises RuntimeError if the server is lost."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS
        from pydantic import ValidationError

        assert self._task is not None
        calling = asyncio.create_task(self.clients[server].call_tool(tool, arguments))
        try:
            await asyncio.wait([calling, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():  # the sessions have ended
                raise RuntimeError(f"the server {server} is lost: {self._why(server, None)}")
            try:
                result = await calling
            except RuntimeError as error:  # the value violates the schema of the tool's output
                return True, f"The result of the tool {tool} cannot be read: {error}"
            return bool(result.is_error), _text(result)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return True, f"Wrong arguments for the tool {tool}: {error.message}"
            if await self._lives(server):
                return True, f"The tool {tool} failed: {error.message}"
            raise RuntimeError(f"the server {server} is lost: {self._why(server, error)}") from error
        except ValidationError:  # for example, content of an unknown type
            return True, f"The result of the tool {tool} cannot be read: it is not a result of the protocol."
        finally:
            calling.cancel()

    async def _lives(self, server: str) -> bool:
        """Returns whether a server still answers after an error; transport errors look like errors of a server."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR

        assert self._task is not None
        asking = asyncio.create_task(self.clients[server].session.send_ping())
        try:
            await asyncio.wait([asking, self._task], timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                await asking
            return asking.done()
        except MCPError as error:  # a server may refuse pings, but it answers
            return error.code not in (CONNECTION_CLOSED, INTERNAL_ERROR)
        finally:
            asking.cancel()

    async def close(self) -> None:
        """Closes the sessions; does not wait longer than `_CLOSE_S` for a server."""
        self._closing.set()
        if self._task is None:
            return
        if not self._opened.is_set():
            self._task.cancel()
        done, late = await asyncio.wait([self._task], timeout=_CLOSE_S)
        for task in late:
            task.cancel()
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None and self._opened.is_set():
                log.warning("a session with an MCP server did not close: %s", _error_text(error))

    def _why(self, name: str, error: BaseException | None) -> str:
        output = self._outputs[name].text() if name in self._outputs else ""
        cause = f" {cause_in(output)}." if "\n" in output else ""
        message = f"{cause} Its output ends with: {output}" if output else ""
        message += proxy_description(self._servers[name].url) if name in self._servers else ""
        return f"{_error_text(error) if error is not None else 'its session has ended'}.{message}"


async def _client(name: str, server: McpServer, output: OutputTail, stack: AsyncExitStack) -> Client:
    """Returns a client that is not open yet; for an HTTP server with a command, starts the server.

    ``stack`` closes the resources of an HTTP client.
    """
    from mcp import Client, StdioServerParameters, stdio_client

    if server.url:
        url = await HTTP_SERVERS.url(name, server) if server.command else server.url
        if not is_loopback_url(url):
            return Client(url)
        import httpx2  # a dependency of the package mcp
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(_HTTP_S, read=_HTTP_READ_S)
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=limits, trust_env=False))
        return Client(streamable_http_client(url, http_client=http))
    command = ends_with_parent(server_command(server.command), signal.SIGKILL)
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(server.env), cwd=server.cwd)
    return Client(stdio_client(parameters, errlog=output.file))


async def listed_tools(servers: Mapping[str, McpServer]) -> list[tuple[str, Any]]:
    """Returns the tools of all servers as pairs of server name and tool."""
    sessions, found = McpSessions(servers), []
    try:
        await sessions.open()
        for name, client in sessions.clients.items():
            page = await client.list_tools()
            found += [(name, tool) for tool in page.tools]
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += [(name, tool) for tool in page.tools]
    finally:
        await sessions.close()
    return found


def _text(result: CallToolResult) -> str:
    """Returns a result as text for the model: its texts, or else its value; for other parts, only their type."""
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents

    texts = []
    for block in result.content:
        if isinstance(block, TextContent):
            texts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            texts.append(block.resource.text)
        else:
            texts.append(f"[a part of type {block.type} is left out]")
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(texts) or "[no output]"


def _error_text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"

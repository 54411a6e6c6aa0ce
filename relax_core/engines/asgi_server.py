"""Shared code of Relax's HTTP servers: reads ASGI requests, sends responses, and limits connections.

The limits prevent that a client blocks other clients, with or without the token. A connection that sends or reads too
slowly is closed after a number of sweeps. A sweep runs once a second while the process runs, so suspended time does not
count. At the connection limit, a new connection replaces the connection that has been idle for longest. Connections
that never sent the token are replaced first, then connections with the token but without a request in progress. A
request in progress is never cut off if its client sent the token. Such requests cannot use all connections: the engine
owner can always connect to check that the server is alive.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from relax_core.engines.held_port import BACKLOG

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"


class HttpError(Exception):
    """Reports that a request is refused with an HTTP status; the text names the key, its value and the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientDisconnected(Exception):
    """Reports that the client closed the connection before its complete request arrived. No response is sent."""


def headers(scope: Scope) -> dict[bytes, bytes]:
    """Returns the request's headers by lower-case name."""
    return dict(scope["headers"])


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """Returns the request's body. Raises HttpError 413 for more than ``limit`` bytes, and ClientDisconnected."""
    announced = int(headers(scope).get(b"content-length", b"0"))
    if announced > limit:
        raise HttpError(413, f"{scope['path']}: body of {announced} bytes, the limit is {limit}; send less")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise HttpError(413, f"{scope['path']}: body of more than {limit} bytes; send less")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def start_response(send: Send, *, status: int, content_type: bytes, length: int | None = None) -> None:
    """Sends the response's head. ``length`` is the length of the body in bytes, if known."""
    fields = [(b"content-type", content_type)]
    if length is not None:
        fields.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def answer(send: Send, payload: Any, *, status: int = 200) -> None:
    """Sends a complete response as JSON."""
    body = msgspec.json.encode(payload)
    await start_response(send, status=status, content_type=JSON, length=len(body))
    await send({"type": "http.response.body", "body": body})


def clipped(words: str, *, length: int = 200) -> str:
    """Returns the first ``length`` characters of a client's text, for an error message."""
    return words if len(words) <= length else f"{words[:length]}…"


def error_payload(status: int, message: str) -> dict[str, Any]:
    """Returns the JSON body of an error response, in SGLang's format."""
    return {"error": {"message": message, "code": status}}


MAX_CONNECTIONS = 1024
KEPT_FREE = 64  # connections that are kept free of requests in progress
OTHER_FILES = 128  # maximum files and sockets of the process, without its connections
HEAD_BYTES = 32 << 10  # maximum size of a request line and headers
PIPELINED = 16  # maximum requests that a client may send before the first response
SWEEP_S = 1.0
HEAD_SWEEPS = 10  # sweeps within which a request's head must arrive
BODY_SWEEPS = 30  # sweeps after which a body's average rate must be at least BODY_RATE
BODY_RATE = 64 << 10  # bytes per sweep
STRANGER_SWEEPS = 60  # sweeps for which a client that never sent the token may be idle
WRITE_SWEEPS = 60  # sweeps within which a client must read some of the written bytes
KEEP_ALIVE = {  # socket options: the kernel detects the loss of a client's machine or network
    socket.TCP_KEEPIDLE: 60,  # seconds of silence before the first probe
    socket.TCP_KEEPINTVL: 10,  # seconds between probes
    socket.TCP_KEEPCNT: 3,  # probes without an answer
    socket.TCP_USER_TIMEOUT: 90_000,  # maximum milliseconds without an acknowledgement of sent data
}
LINGER_SWEEPS = 3  # sweeps for which a refused client may still send; an immediate close could lose the response


class Connection(HttpToolsProtocol):
    """Adds the limits of this module to uvicorn's protocol class.

    The ASGI scope of a request contains its connection as ``connection``.
    """

    def __init__(self, connections: OpenConnections, **options: Any) -> None:
        super().__init__(**options)
        self.knows_token = False
        self._connections = connections
        self._in_head = False  # True while a request's head arrives
        self._receiving = False  # True while a request's head or body arrives
        self._unparsed = 0  # bytes since the parser's last event other than a header
        self._received = 0  # received bytes of the request
        self._unread = 0  # bytes that the client had not read at the last sweep
        self._quiet_sweeps = self._receiving_sweeps = self._stuck_sweeps = self._refused_sweeps = 0
        self._refused = False

    # -- methods that uvicorn and its parser call ---------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Adds the connection to the open connections."""
        super().connection_made(transport)
        if (client := transport.get_extra_info("socket")) is not None and client.family != socket.AF_UNIX:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE.items():
                client.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection from the open connections."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts and parses received bytes; refuses a request with too large a head."""
        if self._refused:
            return
        self._quiet_sweeps = 0
        self._connections.received(self)
        self._received += len(data)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that the parser cannot read, with an error of this module's format."""
        if self._unparsed > HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, "the bytes are not a valid HTTP/1.1 request")

    def on_message_begin(self) -> None:
        """Starts the counters of a new request."""
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests before the first answer")  # ends in `send_400_response`
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        self._in_head = self._receiving = True
        self._receiving_sweeps = self._received = self._unparsed = 0

    def on_headers_complete(self) -> None:
        """Checks the size of the head. The body may follow."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self._unparsed = HEAD_BYTES + 1  # makes `send_400_response` refuse the head
            raise ValueError("the head is too large")  # ends in `send_400_response`
        self._unparsed = 0
        super().on_headers_complete()
        self._in_head = False

    def on_chunk_header(self) -> None:
        """Records that the parser has made progress."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Passes a part of the body to the application."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the time limits on the request, which has arrived completely."""
        self._receiving, self._unparsed = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Allows new connections to replace this connection again."""
        self._connections.answered(self)
        super().on_response_complete()

    # -- limits -------------------------------------------------------------------------------------------------------
    def showed_token(self) -> bool:
        """Protects the request in progress from replacement. Returns False if too many requests are protected."""
        self.knows_token = True
        return self._connections.protect(self)

    def has_hung_up(self) -> bool:
        """Returns whether the client has closed the connection, also before the event loop detects the close."""
        if self.transport.is_closing():
            return True
        arrived = select.poll()
        arrived.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(arrived.poll(0))

    def sweep(self) -> None:
        """Closes the connection if its client is too slow."""
        unread = self.transport.get_write_buffer_size()
        self._stuck_sweeps = self._stuck_sweeps + 1 if unread and unread >= self._unread else 0
        self._unread = unread
        self._quiet_sweeps += 1
        self._refused_sweeps += self._refused
        if self._stuck_sweeps > WRITE_SWEEPS or self._refused_sweeps > LINGER_SWEEPS:
            self.transport.abort()
        elif self._receiving and not self._refused:
            self._sweep_request()
        elif self._is_idle() and not self.knows_token and self._quiet_sweeps > STRANGER_SWEEPS:
            self.transport.close()

    def _sweep_request(self) -> None:
        self._receiving_sweeps += 1
        if self._in_head:
            if self._receiving_sweeps > HEAD_SWEEPS:
                self._refuse(408, f"the request line and headers did not arrive within {HEAD_SWEEPS} s")
        elif not self.flow.read_paused:
            late = self._receiving_sweeps - BODY_SWEEPS
            if late > 0 and self._received < late * BODY_RATE:
                self._refuse(408, f"the request body arrives at less than {BODY_RATE} bytes/s")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request line and headers may have {HEAD_BYTES} bytes at most; send less")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Sends an error, if no other response has begun, and closes the connection."""
        if self._refused or self.transport.is_closing():
            return
        in_body = self._receiving and not self._in_head
        if self.pipeline or (self.cycle.response_started if in_body else not self._is_idle()):
            self.transport.close()
            return
        self._refused = True
        body = msgspec.json.encode(error_payload(status, message))
        lines = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + lines.encode() + body)
        self.transport.write_eof()


class OpenConnections:
    """Tracks the open connections, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._strangers: dict[Connection, None] = {}  # connections that never sent the token, longest idle first
        self._waiting: dict[Connection, None] = {}  # connections with the token, without a request, longest idle first
        self._protected: set[Connection] = set()  # connections with the token and a request in progress

    def __len__(self) -> int:
        return len(self._strangers) + len(self._waiting) + len(self._protected)

    def add(self, connection: Connection) -> None:
        """Adds a new connection. At the limit, closes the connection that has been idle for longest."""
        if len(self) >= self._limit:
            quietest = next(iter(self._strangers or self._waiting))
            self.remove(quietest)
            quietest.transport.abort()
        self._strangers[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forgets a connection."""
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)
        self._protected.discard(connection)

    def received(self, connection: Connection) -> None:
        """Records that the connection is the most recently active connection, because it sent bytes."""
        for connections in (self._strangers, self._waiting):
            if connection in connections:
                del connections[connection]
                connections[connection] = None

    def protect(self, connection: Connection) -> bool:
        """Protects the connection until its request is answered. Returns False if too many are protected already."""
        if connection.transport.is_closing():
            return True
        if connection not in self._protected and len(self._protected) >= self._limit - KEPT_FREE:
            return False
        self.remove(connection)
        self._protected.add(connection)
        return True

    def answered(self, connection: Connection) -> None:
        """Ends the protection of a connection."""
        if connection in self._protected:
            self._protected.remove(connection)
            self._waiting[connection] = None

    async def sweep(self) -> None:
        """Sweeps all connections once a second, forever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in [*self._strangers, *self._waiting, *self._protected]:
                connection.sweep()


def connection_limit() -> int:
    """Returns how many connections this process can have. Raises the process's limit of open files if permitted."""
    reserved = BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + reserved
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2 * KEPT_FREE, min(wanted, soft) - reserved)

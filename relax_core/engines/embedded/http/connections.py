"""Bounds on the engine's connections, so that no client, with or without the token, keeps the others out.

Connections that send or read too slowly end after a number of sweeps. A sweep comes once a second while the process
runs, so that a time in which the process stood still is held against nobody. When all places are taken, a new
connection gets the place of the one that has been quiet for longest: of clients that never showed the token where there
are some, else of those that wait for nothing. A request under way that showed the token is never cut off. Such requests
cannot take all places, so there is always one for an owner who asks for a sign of life.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from relax_core.engines.embedded.http.asgi import error_payload

MAX_CONNECTIONS = 1024
KEPT_FREE = 64  # places that requests under way never take
BACKLOG = 512  # connections that the kernel holds until they are accepted; then they come all at one time
OTHER_FILES = 128  # files and sockets that the process has beside its connections
HEAD_BYTES = 32 << 10  # of a request's line and headers
PIPELINED = 16  # requests that a client may send before it has read the first answer
SWEEP_S = 1.0
HEAD_SWEEPS = 10  # in which a request's head must come
BODY_SWEEPS = 30  # after which a body must have come with BODY_RATE
BODY_RATE = 64 << 10  # bytes a sweep
STRANGER_SWEEPS = 60  # for which a client that never showed the token may be quiet
WRITE_SWEEPS = 60  # in which a client must read some of what was written
LINGER_SWEEPS = 3  # for which a refused client may go on sending: without that it may lose the answer


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds. The scope of a request has its connection as ``connection``."""

    def __init__(self, places: Places, **options: Any) -> None:
        super().__init__(**options)
        self.knows_token = False
        self._places = places
        self._in_head = self._receiving = False  # a request's head, the request itself, has begun and is not whole
        self._untold = 0  # bytes that the parser got since it last told of something other than a header
        self._received = 0  # bytes of the request
        self._unread = 0  # bytes that the client had not read at the last sweep
        self._quiet_sweeps = self._receiving_sweeps = self._stuck_sweeps = self._refused_sweeps = 0
        self._refused = False

    # -- what uvicorn and its parser call -----------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._places.take(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._quiet_sweeps = 0
        self._places.heard(self)
        self._received += len(data)
        self._untold += len(data)
        super().data_received(data)
        if self._untold > HEAD_BYTES:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._untold > HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(400, "this is no HTTP/1.1 request that can be read")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests before the first answer")  # ends in `send_400_response`
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        self._in_head = self._receiving = True
        self._receiving_sweeps = self._received = self._untold = 0

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self._untold = HEAD_BYTES + 1  # it came in one piece
            raise ValueError("the head is too large")  # ends in `send_400_response`
        self._untold = 0
        super().on_headers_complete()
        self._in_head = False

    def on_chunk_header(self) -> None:
        self._untold = 0

    def on_body(self, body: bytes) -> None:
        self._untold = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving, self._untold = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._places.answered(self)
        super().on_response_complete()

    # -- bounds -------------------------------------------------------------------------------------------------------
    def showed_token(self) -> bool:
        """The request under way may stay for as long as it takes. False where there are too many such requests."""
        self.knows_token = True
        return self._places.keep(self)

    def sweep(self) -> None:
        """Ends the connection where it is too slow."""
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
                self._refuse(408, f"the request's line and headers have not come within {HEAD_SWEEPS} s")
        elif not self.flow.read_paused:
            late = self._receiving_sweeps - BODY_SWEEPS
            if late > 0 and self._received < late * BODY_RATE:
                self._refuse(408, f"the request's body comes with less than {BODY_RATE} bytes/s")

    def _refuse_head(self) -> None:
        self._refuse(431, f"a request's line and headers have {HEAD_BYTES} bytes at most; send less")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answers, where no other answer has begun, and hangs up."""
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


class Places:
    """The open connections, ``limit`` at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._strangers: dict[Connection, None] = {}  # that never showed the token; as below the quietest first
        self._waiting: dict[Connection, None] = {}  # that did, and have no request under way
        self._kept: set[Connection] = set()  # with a request under way that showed it

    def __len__(self) -> int:
        return len(self._strangers) + len(self._waiting) + len(self._kept)

    def take(self, connection: Connection) -> None:
        """A new connection; where there is no place the quietest one goes."""
        if len(self) >= self._limit:
            quietest = next(iter(self._strangers or self._waiting))
            self.leave(quietest)
            quietest.transport.abort()
        self._strangers[connection] = None

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)
        self._kept.discard(connection)

    def heard(self, connection: Connection) -> None:
        """It has sent something."""
        for place in (self._strangers, self._waiting):
            if connection in place:
                del place[connection]
                place[connection] = None

    def keep(self, connection: Connection) -> bool:
        """Its request may stay; False where too many do already."""
        if connection.transport.is_closing():
            return True
        if connection not in self._kept and len(self._kept) >= self._limit - KEPT_FREE:
            return False
        self.leave(connection)
        self._kept.add(connection)
        return True

    def answered(self, connection: Connection) -> None:
        if connection in self._kept:
            self._kept.remove(connection)
            self._waiting[connection] = None

    async def sweep(self) -> None:
        """Looks at all connections once a second, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in [*self._strangers, *self._waiting, *self._kept]:
                connection.sweep()


def connection_limit() -> int:
    """How many connections this process can have; it takes the file descriptors for them where it may."""
    others = BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2 * KEPT_FREE, min(wanted, soft) - others)

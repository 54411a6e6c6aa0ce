"""Makes a server of the run prove that it knows the run's token, before a client sends the token on a connection.

When a server crashes, its port may become free, and another local user may bind the port. A client therefore first
sends a random nonce. The server answers with a keyed hash (HMAC-SHA256) of the nonce and the server's address. The key
is the token, so an intruder cannot compute the hash. An intruder cannot relay the nonce to a real server, because the
real server has another address. An intruder cannot replay an earlier answer, because it belongs to another nonce.

The module also implements the connection for control calls, with a deadline per call and a size limit for replies. It
uses only the standard library, because it also runs in SGLang's environment.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

PATH = "/relax_proof"
ANSWER_BYTES = 4096  # maximum size of the answer, including its head
_QUERY = re.compile(rb"nonce=([0-9a-f]{64})")
_DIGITS = 64  # hexadecimal digits of a nonce and of a proof
# This prefix is hashed with the nonce. No other keyed hash of the token uses it, so an answer is useless elsewhere.
_PREFIX = b"relax server proof"

_App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Any]


class ServerUnproven(ConnectionError):
    """Reports that a server did not prove that it knows the token. The client has not sent the token."""


def proof(token: str, *, nonce: bytes, address: tuple[str, int]) -> bytes:
    """Returns the proof in hexadecimal digits. ``address`` is the server's IP address and port."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    message = b"\n".join((_PREFIX, nonce, str(host).encode(), str(address[1]).encode()))
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest().encode()


def proof_answer(token: str, *, query: bytes, address: tuple[str, int]) -> bytes | None:
    """Returns a server's answer to GET `PATH` with this query string; None means status 400.

    ``address`` is the result of ``getsockname`` of the connection.
    """
    match = _QUERY.fullmatch(query)
    return None if match is None else proof(token, nonce=match[1], address=address[:2])


class ServerProof:
    """Wraps the ASGI application ``app``: answers `PATH` without a token; ``app`` answers all other requests."""

    def __init__(self, app: Any, *, token: str) -> None:
        self._app: _App = app
        self._token = token

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answers one request."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        answer = None
        if scope["method"] == "GET":
            answer = proof_answer(self._token, query=scope["query_string"], address=scope["server"])
        status, body = (400, b"nonce: send GET with 64 hexadecimal digits") if answer is None else (200, answer)
        fields = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


class ProofExchange:
    """Implements the client's side of one proof exchange on a new connection. The caller transfers the bytes.

    ``address`` is the result of ``getpeername`` of the connection. ``request`` has the bytes to send.
    """

    def __init__(self, token: str, *, address: tuple[Any, ...]) -> None:
        nonce = secrets.token_hex(_DIGITS // 2).encode()
        self._address = str(address[0]), int(address[1])
        self._expected = proof(token, nonce=nonce, address=self._address)
        self._received = b""
        host = f"[{self._address[0]}]" if ":" in self._address[0] else self._address[0]
        self.request = b"GET %s?nonce=%s HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (
            PATH.encode(),
            nonce,
            host.encode(),
            self._address[1],
        )

    def feed(self, data: bytes) -> bool:
        """Processes received bytes, b"" at the end. Returns True when the server has proven that it knows the token.

        Raises `ServerUnproven`.
        """
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not data:
            raise self._unproven("it closed the connection")
        if len(self._received) > ANSWER_BYTES:
            raise self._unproven(f"its answer has more than {ANSWER_BYTES} bytes")
        if not found:
            return False
        status, *fields = head.split(b"\r\n")
        if not status.startswith(b"HTTP/1.1 200 "):
            raise self._unproven(f"it answers {status[:60]!r}")
        if not any(re.fullmatch(rb"(?i)content-length: *%d" % _DIGITS, field) for field in fields):
            raise self._unproven("its answer has another length")
        if len(body) < _DIGITS:
            return False
        if not hmac.compare_digest(body, self._expected):
            raise self._unproven("its answer is wrong")
        return True

    def _unproven(self, why: str) -> ServerUnproven:
        host, port = self._address
        return ServerUnproven(
            f"the server at {host} port {port} does not prove that it knows the run's token: {why}. Another process "
            "may have taken the port"
        )


PART_BYTES = 1 << 16
HEAD_BYTES = 1 << 20  # maximum size of a reply's head, and of its chunk headers
_AGAIN = http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError  # the server has closed the connection


class ReplyTooLong(http.client.HTTPException):
    """Reports that a reply has more bytes than the caller accepts."""


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until the deadline of `_DeadlineSocket`."""

    def __init__(self, owner: _DeadlineSocket, stream: io.RawIOBase) -> None:
        self._owner, self._stream = owner, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._owner.use_time_left()
        read = self._stream.readinto(buffer)
        self._owner.count(read or 0)
        return read

    def close(self) -> None:
        self._stream.close()
        super().close()


class _DeadlineSocket:
    """Wraps a connected socket for `http.client`.

    The timeout of a socket applies to each received part, so a server that sends single bytes could block a caller
    forever. This class has one deadline for all parts together, and a limit for their bytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.deadline = 0.0
        self.max_bytes = 0

    def count(self, size: int) -> None:
        self.max_bytes -= size
        if self.max_bytes < 0:
            raise ReplyTooLong("a reply with more bytes than the caller accepts")

    def use_time_left(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the call has passed")
        self._socket.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self.use_time_left()
        self._socket.sendall(data)

    def receive(self, size: int) -> bytes:
        self.use_time_left()
        return self._socket.recv(size)

    def server_address(self) -> tuple[Any, ...]:
        return cast("tuple[Any, ...]", self._socket.getpeername())

    def makefile(self, mode: str) -> io.BufferedReader:
        # The stream keeps the descriptor open: `http.client` may close the socket before reading.
        stream = cast("io.RawIOBase", self._socket.makefile("rb", buffering=0))
        return io.BufferedReader(_DeadlineReader(self, stream), PART_BYTES)

    def close(self) -> None:
        self._socket.close()


class _Connection(http.client.HTTPConnection):
    """Connects until ``deadline``. With ``token``, first requests the server's proof."""

    auto_open = 0

    def __init__(self, host: str, port: int | None, *, token: str | None, deadline: float) -> None:
        super().__init__(host, port, timeout=max(0.001, deadline - time.monotonic()))
        self._token = token
        self.deadline = deadline

    def connect(self) -> None:
        super().connect()
        guarded = _DeadlineSocket(self.sock)
        guarded.deadline = self.deadline
        self.sock = cast("socket.socket", guarded)
        if self._token is None:
            return
        exchange = ProofExchange(self._token, address=guarded.server_address())
        guarded.sendall(exchange.request)
        while not exchange.feed(guarded.receive(PART_BYTES)):
            pass


class ProvenConnection:
    """Keeps one connection to a server of the run. Only one thread at a time may use the connection.

    On each new connection, the server must prove that it knows ``token``. If ``token`` is None, no proof is requested.
    """

    def __init__(self, host: str, port: int | None, *, token: str | None) -> None:
        self._host, self._port, self._token = host, port, token
        self._connection: _Connection | None = None

    def call(
        self, method: str, route: str, body: bytes, headers: dict[str, str], *, timeout_s: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Returns status and body of the reply. The complete reply must arrive within ``timeout_s`` seconds.

        If the server has closed the kept connection, for example by a restart, opens a new connection once. Raises
        OSError (including `ServerUnproven` and TimeoutError), or HTTPException for a reply that is not HTTP or exceeds
        ``max_bytes``.
        """
        deadline = time.monotonic() + timeout_s
        reused = self._connection is not None
        try:
            return self._once(method, route, body, headers, deadline=deadline, max_bytes=max_bytes)
        except _AGAIN:
            self.close()
            if not reused:
                raise
        return self._once(method, route, body, headers, deadline=deadline, max_bytes=max_bytes)

    def _once(
        self, method: str, route: str, body: bytes, headers: dict[str, str], *, deadline: float, max_bytes: int
    ) -> tuple[int, bytes]:
        whole = False
        try:
            if self._connection is None:
                connection = _Connection(self._host, self._port, token=self._token, deadline=deadline)
                self._connection = connection
                connection.connect()
            guarded = cast("_DeadlineSocket", self._connection.sock)
            guarded.deadline, guarded.max_bytes = deadline, max_bytes + HEAD_BYTES
            self._connection.request(method, route, body, headers)
            response = self._connection.getresponse()
            try:
                data = response.read(max_bytes + 1)
            except ValueError as error:  # a chunk has a negative size
                raise http.client.HTTPException(f"a body that cannot be read: {error}") from error
            if len(data) > max_bytes:
                raise ReplyTooLong(f"a reply of more than {max_bytes} bytes")
            if response.length:
                raise http.client.IncompleteRead(data, response.length)
            whole = response.isclosed() or not response.read(1)
            if self._connection.sock is None:  # the server closes the connection after this reply
                self.close()
            return response.status, data
        finally:
            if not whole:
                self.close()

    def close(self) -> None:
        """Closes the connection. The next call opens a new connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

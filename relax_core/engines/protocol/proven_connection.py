"""Is the HTTP connection of control calls: it proves the server, has one deadline for each call, and bounds replies."""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import Any, cast

from relax_core.engines.protocol.server_proof import ProofExchange

PART_BYTES = 1 << 16
HEAD_BYTES = 1 << 20  # of a reply's head, and of the sizes of its chunks
_AGAIN = http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError  # how a kept connection ends


class ReplyTooLong(http.client.HTTPException):
    """Says that a reply has more bytes than the caller takes."""


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until the deadline that the socket's owner has set."""

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
    """Is the socket that `http.client` sees.

    A time limit of a socket counts for each part that arrives. A server that sends one byte now and then would keep a
    caller for ever, so this socket has a deadline for all parts together, and a limit for their bytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.deadline = 0.0
        self.most_bytes = 0

    def count(self, size: int) -> None:
        self.most_bytes -= size
        if self.most_bytes < 0:
            raise ReplyTooLong("a reply with more bytes than the caller takes")

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
        # The socket's own stream keeps the descriptor open: `http.client` may close the socket before it reads.
        stream = cast("io.RawIOBase", self._socket.makefile("rb", buffering=0))
        return io.BufferedReader(_DeadlineReader(self, stream), PART_BYTES)

    def close(self) -> None:
        self._socket.close()


class _Connection(http.client.HTTPConnection):
    """Connects until ``deadline``; with ``token`` it asks the server for the proof before anything else is sent."""

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
    """Keeps one connection to a server of the run; it belongs to one thread at a time.

    ``token`` is what the server has to prove that it knows on each new connection; with None nothing is asked.
    """

    def __init__(self, host: str, port: int | None, *, token: str | None) -> None:
        self._host, self._port, self._token = host, port, token
        self._connection: _Connection | None = None

    def call(
        self, method: str, route: str, body: bytes, headers: dict[str, str], *, timeout_s: float, most_bytes: int
    ) -> tuple[int, bytes]:
        """Returns status and body of the reply, which has come as a whole within ``timeout_s`` seconds.

        A kept connection that the server has closed is opened again once, because a server that was restarted closes
        it. Raises OSError (`ServerUnproven` and TimeoutError among them), or HTTPException for a reply that is no HTTP
        or has more than ``most_bytes``.
        """
        deadline = time.monotonic() + timeout_s
        reused = self._connection is not None
        try:
            return self._once(method, route, body, headers, deadline=deadline, most_bytes=most_bytes)
        except _AGAIN:
            self.close()
            if not reused:
                raise
        return self._once(method, route, body, headers, deadline=deadline, most_bytes=most_bytes)

    def _once(
        self, method: str, route: str, body: bytes, headers: dict[str, str], *, deadline: float, most_bytes: int
    ) -> tuple[int, bytes]:
        whole = False
        try:
            if self._connection is None:
                connection = _Connection(self._host, self._port, token=self._token, deadline=deadline)
                self._connection = connection
                connection.connect()
            guarded = cast("_DeadlineSocket", self._connection.sock)
            guarded.deadline, guarded.most_bytes = deadline, most_bytes + HEAD_BYTES
            self._connection.request(method, route, body, headers)
            response = self._connection.getresponse()
            try:
                data = response.read(most_bytes + 1)
            except ValueError as error:  # of a chunk with a negative size
                raise http.client.HTTPException(f"a body that cannot be read: {error}") from error
            if len(data) > most_bytes:
                raise ReplyTooLong(f"a reply of more than {most_bytes} bytes")
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
        """Closes the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

"""A server that responds with arbitrary bytes. It knows the run's token, so clients trust it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from relax_core.engines.protocol.server_proof import PATH, proof_answer

TOKEN = "token-of-the-run"
Piece = bytes | float  # bytes to send, or seconds to wait


class Endless:
    """A response that never ends: ``begin``, then ``part`` repeatedly, with pauses of ``pause_s`` seconds."""

    def __init__(self, begin: bytes, part: bytes, *, pause_s: float = 0.0) -> None:
        self.begin, self.part, self.pause_s = begin, part, pause_s


def http(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """Returns a complete reply."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class BrokenServer:
    """Answers the proof request, answers any other request with ``reply``, and then closes the connection."""

    def __init__(self) -> None:
        self.reply: bytes | Endless = b""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := self._request(connection):
                path, _, query = request.split(b" ")[1].partition(b"?")
                if path != PATH.encode():
                    self._answer(connection)
                    return
                proof = proof_answer(TOKEN, query=query, address=connection.getsockname())
                connection.sendall(http(proof or b"", kind="text/plain"))

    def _request(self, connection: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(1 << 16)
            if not part:
                return b""
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        left = int(lengths[0]) - len(body) if lengths else 0
        while left > 0:
            left -= len(connection.recv(1 << 16))
        return head

    def _answer(self, connection: socket.socket) -> None:
        reply = self.reply
        if isinstance(reply, bytes):
            connection.sendall(reply)
            return
        connection.sendall(reply.begin)
        while not self._closed and self.reply is reply:
            connection.sendall(reply.part)
            time.sleep(reply.pause_s)

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def broken_server() -> Iterator[BrokenServer]:
    server = BrokenServer()
    try:
        yield server
    finally:
        server.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DEEP = 100_000
# Bytes that are not HTTP, or that lack the JSON fields which the typed calls need.
GARBAGE: dict[str, Any] = {
    "nothing": b"",
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(4096),
    "random": bytes(range(256)) * 64,
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a head alone": HEAD + b"\r\n",
    "another version": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "no status": b"HTTP/1.1 \r\n\r\n{}",
    "status of letters": b"HTTP/1.1 abc OK\r\n\r\n{}",
    "status 000": http(b"{}", status="000 No"),
    "status 199": http(b"{}", status="199 No"),
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status 299": http(b"{}", status="299 Odd"),
    "status 999": http(b"{}", status="999 No"),
    "redirect": http(b"{}", status="307 Temporary", more="Location: http://127.0.0.1:1/\r\n"),
    "redirect to a file": http(b"{}", status="302 Found", more="Location: file:///etc/passwd\r\n"),
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "empty": http(b""),
    "html": http(b"<html>hello</html>", kind="text/html"),
    "array": http(b"[]"),
    "null": http(b"null"),
    "number": http(b"1"),
    "text": http(b'"{}"'),
    "object": http(b"{}"),
    "truncated": http(b'{"weight_version": "1", "loads": [{"num_run'),
    "nan": http(b'{"weight_version": NaN, "loads": NaN, "stall_ms": NaN}'),
    "infinity": http(b'{"weight_version": 1e999, "loads": [1e999], "stall_ms": 1e999}'),
    "negative": http(b'{"weight_version": -7, "loads": [{"num_running_reqs": -1}], "stall_ms": -1}'),
    "large": http(b'{"weight_version": 99999999999999999999, "loads": [], "stall_ms": 1e300}'),
    "5000 digits": http(b'{"weight_version": "%s", "loads": [{}], "stall_ms": %s}' % (b"9" * 5000, b"9" * 5000)),
    "other digits": http('{"weight_version": "٣", "loads": {"0": 1}, "stall_ms": "٣"}'.encode()),
    "wrong types": http(b'{"weight_version": [], "loads": [[]], "stall_ms": {}, "ranks": 1}'),
    "nulls": http(b'{"weight_version": null, "loads": [null], "stall_ms": null, "ranks": [null]}'),
    "bad utf-8": http(b'{"weight_version": "\xff\xfe", "loads": "\xc3\x28", "stall_ms": "\xed\xa0\x80"}'),
    "half a surrogate": http(rb'{"weight_version": "\ud800", "loads": "\udfff"}'),
    "deep arrays": http(b"[" * DEEP),
    "deep objects": http(b'{"loads":' * DEEP),
    "deep in a field": http(b'{"other": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "length too large": HEAD + b"Content-Length: 100\r\n\r\n{}",
    "length too small": HEAD + b"Content-Length: 1\r\n\r\n{}",
    "length negative": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "length of letters": HEAD + b"Content-Length: many\r\n\r\n{}",
    "length of 10^18": HEAD + b"Content-Length: 1000000000000000000\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    "bad chunk": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n",
    "endless chunk size": CHUNKED + b"1" * 100_000,
    "no last chunk": CHUNKED + b"2\r\n{}\r\n",
    "gzip": http(b"\x1f\x8b\x08\x00", more="Content-Encoding: gzip\r\n"),
    "unknown encoding": http(b"{}", more="Content-Encoding: br, x\r\n"),
    "long header": HEAD + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n{}",
    "many headers": HEAD + b"".join(b"X%d: 1\r\n" % number for number in range(5000)) + b"\r\n{}",
    "cookies": http(b"{}", more="Set-Cookie: a=b; Domain=127.0.0.1\r\n"),
    "refusal without words": http(b"", status="500 Internal Server Error"),
    "refusal of odd shape": http(b'{"error": [1, {"message": 2}]}', status="400 Bad Request"),
    "deep refusal": http(b'{"error":' * DEEP, status="503 Busy"),
    "long refusal": http(b"x\r\n\x1b[31m\xe2\x80\xae" * (1 << 17), status="500 Error"),
    "long body": http(b'{"a": "' + b"a" * (33 << 20) + b'"}'),
}
ENDLESS: dict[str, Any] = {
    "silence": Endless(b"", b"", pause_s=0.05),
    "100 Continue": Endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.01),
    "a head byte by byte": Endless(b"HTTP/1.1 200 OK\r\nX: ", b"a", pause_s=0.02),
    "a body byte by byte": Endless(HEAD + b"Content-Length: 1000000\r\n\r\n{", b" ", pause_s=0.02),
    "a chunk now and then": Endless(CHUNKED, b"1\r\n \r\n", pause_s=0.02),
    "a body at full speed": Endless(HEAD + b"\r\n{", b" " * (1 << 16)),
}

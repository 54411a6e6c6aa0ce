"""Lets a server of the run prove on each connection that it knows the run's token, before a client sends the token.

When a server crashes, its port may become free, and another local user may take it. A client therefore sends a random
nonce first, and the server answers with a keyed hash (HMAC-SHA256) of the nonce and of its own address. The key is the
token. An intruder cannot compute the hash. An intruder who passes the nonce on to a real server fails too, because the
real server has another address. An answer that was recorded earlier belongs to another nonce.

The module needs the standard library alone, because it also runs in the environment of SGLang.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/relax_proof"
ANSWER_BYTES = 4096  # most bytes of the answer with its head
_QUERY = re.compile(rb"nonce=([0-9a-f]{64})")
_DIGITS = 64  # of a nonce and of a proof
# No other keyed hash of the token begins with this text, so that an answer is of no use elsewhere.
_PREFIX = b"relax server proof"

_App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Any]


class ServerUnproven(ConnectionError):
    """Says that a server does not prove that it knows the token; the client has not sent the token."""


def proof(token: str, *, nonce: bytes, address: tuple[str, int]) -> bytes:
    """Returns the proof in hexadecimal digits; ``address`` is the IP address and the port of the server's side."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    message = b"\n".join((_PREFIX, nonce, str(host).encode(), str(address[1]).encode()))
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest().encode()


def proof_answer(token: str, *, query: bytes, address: tuple[str, int]) -> bytes | None:
    """Returns the answer of a server to GET `PATH` with this query string; None asks for status 400.

    ``address`` is the server's side of the connection, as ``getsockname`` returns it.
    """
    match = _QUERY.fullmatch(query)
    return None if match is None else proof(token, nonce=match[1], address=address[:2])


class ServerProof:
    """Is an ASGI application that answers `PATH` without a token, and passes all other requests on to ``app``."""

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
    """Is the client's side of one exchange on a new connection; it sends and receives nothing itself.

    ``address`` is the server's side of the connection, as ``getpeername`` returns it. ``request`` holds the bytes to
    send.
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
        """Takes received bytes, b"" for the end; returns True once the server has proven that it knows the token.

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

"""Guards the gateway's routes: the Host header, the token, the rate, the type and the size of a body."""

from __future__ import annotations

import time
from collections.abc import Collection
from hmac import compare_digest

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_core.server.problems import PROBLEM, Refusal

OPEN = "/healthz"  # the one route without a token
BODY_BYTES = 64 << 10
REQUESTS_A_SECOND = 100
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


def refusal_answer(refusal: Refusal) -> Response:
    """Returns the answer that a refusal is."""
    return Response(msgspec.json.encode(refusal.problem), refusal.status, refusal.headers, media_type=PROBLEM)


class Guard:
    """Passes a request on to ``app`` if it may come in.

    ``hosts`` are names under which the gateway is reached beside those of loopback: a page whose name was pointed at
    this machine has another Host header. The token is never looked for in a URL or a cookie, so no page can send it.
    Requests without the token are counted apart, so that they do not keep out those that have it.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        self._app = app
        self._authorization = f"Bearer {token}".encode()
        self._hosts = {*LOOPBACK_NAMES, *(host.lower() for host in hosts)}
        self._second, self._requests = 0, {False: 0, True: 0}  # by whether they showed the token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        assert scope["type"] == "http", "the server has neither websockets nor a lifespan"
        try:
            self._check(scope)
            connection = scope.get("connection")  # it is missing where no server is, as in a test
            if scope["path"] != OPEN and connection is not None and not connection.showed_token():
                raise Refusal("too-many-connections", "too many requests are under way", headers={"Retry-After": "1"})
            body = await _read_body(scope, receive)
        except Refusal as refusal:
            await refusal_answer(refusal)(scope, receive, send)
            return
        if body is None:
            return
        parts = [body]

        async def whole() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await receive()

        await self._app(scope, whole, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self._hosts:
            raise Refusal(
                "unknown-host",
                "the Host header names no host of this gateway",
                key="Host",
                value=host[:100],
                fix="name the host in gateway.allowed_hosts",
            )
        knows_token = compare_digest(headers.get(b"authorization", b""), self._authorization)
        if (second := int(time.monotonic())) != self._second:
            self._second, self._requests = second, dict.fromkeys(self._requests, 0)
        self._requests[knows_token] += 1
        if self._requests[knows_token] > REQUESTS_A_SECOND:
            raise Refusal(
                "too-many-requests",
                f"more than {REQUESTS_A_SECOND} requests in one second",
                headers={"Retry-After": "1"},
                fix="ask less often",
            )
        if scope["path"] != OPEN and not knows_token:
            raise Refusal(
                "no-token",
                "this route wants the token of this run",
                headers={"WWW-Authenticate": "Bearer"},
                key="Authorization",
                fix="send Authorization: Bearer TOKEN with the token in gateway.json of the run's folder",
            )


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """Returns the body, or None if the client has left; refuses one that is too large or no JSON."""
    headers, parts, size = dict(scope["headers"]), [], 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_BYTES:
            raise Refusal("too-large", f"a body has at most {BODY_BYTES} bytes", fix="send less")
        more = message.get("more_body", False)
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if size and kind != "application/json":
        raise Refusal(
            "no-json",
            "a body is JSON",
            key="Content-Type",
            value=kind[:100],
            fix="send Content-Type: application/json",
        )
    return b"".join(parts)

"""Checks each HTTP request: its Host, Origin, token or session key, rate and body.

Programs send the run's token. The page sends the key of a session. It gets the key in exchange for the one-time token
of a link, keeps the key in the storage of the browser tab, and sends it in a header. A cookie would not be safe: the
browser would send it to every port of this machine, and so to servers of other users.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Collection

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_core.server.order_types import PROBLEM, Refusal

OPEN = "/healthz"  # the only route for programs without a token
EXCHANGE = "/api/session"  # the page sends the link's token and gets the session key; the body is not JSON
GATEWAY = "/api/gateway"  # prefix under which the page can use the routes `_OF_PAGE` for programs
_OF_PAGE = ("/rollout/", "/run/stall")
BODY_BYTES = 64 << 10
REQUESTS_A_SECOND = 100
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Session:
    """Holds the one-time token of the next link, and the session's ``key``, random by default."""

    def __init__(self, key: str | None = None) -> None:
        self._key = key or secrets.token_urlsafe(32)
        self.link_token = secrets.token_urlsafe(32)

    def exchange(self, token: str) -> str | None:
        """Returns the session key if ``token`` is the token of the newest link, and invalidates it.

        Otherwise returns None.
        """
        if not hmac.compare_digest(token.encode(), self.link_token.encode()):
            return None
        self.link_token = secrets.token_urlsafe(32)
        return self._key

    def knows(self, authorization: str) -> bool:
        """Returns whether the Authorization header of a request has the session's key."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode())


def refusal_answer(refusal: Refusal) -> Response:
    """Returns the HTTP response of a refusal."""
    return Response(msgspec.json.encode(refusal.problem), refusal.status, refusal.headers, media_type=PROBLEM)


class RequestGuard:
    """Passes permitted requests to ``app``. Adds security headers to every response.

    The Host must be in ``names``. This stops DNS rebinding, where a foreign page sends another host name. Keys in URLs
    and cookies are ignored.

    - The page uses ``/``, ``/static/`` and ``/api/``. ``/api/`` requires the key of ``session``. The Host must have
      this server's ``port``, and a foreign Origin is refused. Under ``/api/gateway`` the page reads engines and places
      orders. Under this path all requests except GET require an Origin. A browser sends an Origin with each request
      that may change something, so a link or form of another site cannot place an order.
    - Programs use all other routes, which require ``token``. If ``token`` is None, these routes do not exist. Requests
      without the token are counted separately, so they do not block requests with the token.

    If there are too many connections, a connection with a valid key is never closed for a new connection
    (`relax_core.engines.asgi_server`).
    """

    def __init__(
        self,
        app: ASGIApp,
        session: Session,
        *,
        port: Callable[[], int],
        names: Collection[str] = LOOPBACK_NAMES,
        token: str | None = None,
    ) -> None:
        self._app, self._session, self._port, self._token = app, session, port, token
        self._names = {*LOOPBACK_NAMES, *(name.lower() for name in names)}
        self._second, self._requests = 0, {False: 0, True: 0}  # whether the request has the token → counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        assert scope["type"] == "http", "the server has neither websockets nor a lifespan"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        try:
            scope = self._checked(scope)
            body = await _read_body(scope, receive)
        except Refusal as refusal:
            await refusal_answer(refusal)(scope, receive, send_guarded)
            return
        if body is None:
            return
        parts = [body]

        async def whole() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await receive()

        await self._app(scope, whole, send_guarded)

    def _checked(self, scope: Scope) -> Scope:
        """Returns the scope for the application if the request is permitted. Otherwise raises `Refusal`."""
        path: str = scope["path"]
        fields = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, authorization = fields.get(b"host", "").lower(), fields.get(b"authorization", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        of_page = self._token is None or path == "/" or path.startswith(("/api/", "/static/"))
        ours = {f"{own_name}:{self._port()}" for own_name in self._names}
        if name not in self._names or (of_page and host not in ours):
            raise Refusal(
                "unknown-host",
                "the Host header is not an address of this server",
                key="Host",
                value=host[:100],
                fix="use the printed link, or name the host in gateway.allowed_hosts",
            )
        if not of_page:
            self._check_program(path, authorization)
            if path != OPEN:
                _check_connection(scope)
            return scope
        origin = fields.get(b"origin")
        if origin is not None and origin.removeprefix("http://") not in ours:
            raise Refusal("unknown-origin", "a page of another site sent the request", key="Origin")
        if not path.startswith("/api/") or path == EXCHANGE:
            return scope
        if not self._session.knows(authorization):
            raise Refusal("no-token", "open the newest link that the command printed")
        _check_connection(scope)
        if not path.startswith(GATEWAY):
            return scope
        path = path.removeprefix(GATEWAY)
        if self._token is None or not (path.startswith(_OF_PAGE[0]) or path == _OF_PAGE[1]):
            raise Refusal("unknown-route", f"the page of a run reaches only {_OF_PAGE[0]}… and {_OF_PAGE[1]}")
        if scope["method"] != "GET" and origin is None:
            raise Refusal("no-origin", "an order from the page needs the header Origin", key="Origin")
        return {**scope, "path": path, "raw_path": path.encode()}

    def _check_program(self, path: str, authorization: str) -> None:
        knows_token = hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())
        if (second := int(time.monotonic())) != self._second:
            self._second, self._requests = second, dict.fromkeys(self._requests, 0)
        self._requests[knows_token] += 1
        if self._requests[knows_token] > REQUESTS_A_SECOND:
            message = f"more than {REQUESTS_A_SECOND} requests in one second"
            raise Refusal("too-many-requests", message, headers={"Retry-After": "1"}, fix="ask less often")
        if path != OPEN and not knows_token:
            raise Refusal(
                "no-token",
                "this route needs the token of this run",
                headers={"WWW-Authenticate": "Bearer"},
                key="Authorization",
                fix="send Authorization: Bearer TOKEN with the token in gateway.json of the run's folder",
            )


def _check_connection(scope: Scope) -> None:
    connection = scope.get("connection")  # missing in a test without a server
    if connection is not None and not connection.showed_token():
        raise Refusal("too-many-connections", "too many requests are under way", headers={"Retry-After": "1"})


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """Returns the body, or None if the client has disconnected. Refuses a body that is too large or not JSON."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_BYTES:
            raise Refusal("too-large", f"a body has at most {BODY_BYTES} bytes", fix="send less")
        more = message.get("more_body", False)
    kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if size and kind != "application/json" and scope["path"] != EXCHANGE:
        fix = "send Content-Type: application/json"
        raise Refusal("no-json", "a body is JSON", key="Content-Type", value=kind[:100], fix=fix)
    return b"".join(parts)

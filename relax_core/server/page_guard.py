"""Guards the page: a one-time link becomes a session, and no other host, origin or reader gets an answer with data.

The page keeps the key of its session in the storage of its tab and sends it as a header. A cookie would go to every
port of this machine, and so to the servers of other users.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
]
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Session:
    """Holds the token of the next link, which works once, and the session's ``key``, by default a random one."""

    def __init__(self, key: str | None = None) -> None:
        self._key = key or secrets.token_urlsafe(32)
        self.link_token = secrets.token_urlsafe(32)

    def exchange(self, token: str) -> str | None:
        """Returns the session's key for the token of the newest link, which then works no more; else None."""
        if not hmac.compare_digest(token.encode(), self.link_token.encode()):
            return None
        self.link_token = secrets.token_urlsafe(32)
        return self._key

    def knows(self, authorization: str) -> bool:
        """Returns whether the Authorization header of a request has the session's key."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._key}".encode())


class Guard:
    """Is an ASGI app around the page's own one.

    Every answer gets the headers of the content-security policy. A request whose Host is not one of ``names`` with the
    server's port gets 403, which stops names of other sites that lead here. What lies below ``/api`` gets 401 without
    ``Authorization: Bearer KEY``, but for the exchange of the link's token. An Origin that is not ours gets 403. A
    connection that showed the key is not replaced by strangers (`http_server/connections.py`).
    """

    def __init__(self, app: App, session: Session, *, port: Callable[[], int], names: Collection[str]) -> None:
        self._app, self._session, self._port, self._names = app, session, port, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in _HEADERS}
                kept = [field for field in message.get("headers", []) if field[0].lower() not in own]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        refused = self._refusal(scope)
        if refused is None:
            await self._app(scope, receive, send_guarded)
            return
        status, text = refused
        body = text.encode()
        fields = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        await send_guarded({"type": "http.response.start", "status": status, "headers": fields})
        await send_guarded({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        fields = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        hosts = {f"{name}:{self._port()}" for name in self._names}
        if fields.get(b"host") not in hosts:
            return 403, "The Host of the request is not this server's address. Use the link that the command printed."
        origin = fields.get(b"origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            return 403, "Another site's page asks. Only the dashboard's own page may."
        path = scope["path"]
        if not path.startswith("/api/") or path == "/api/session":
            return None
        if not self._session.knows(fields.get(b"authorization", "")):
            return 401, "Open the link that the command printed last."
        connection = scope.get("connection")  # it is missing where no server is, as in a test
        if connection is not None and not connection.showed_token():
            return 503, "Too many requests are under way. Try again."
        return None

"""Routes requests to their handlers as one ASGI application, checks the bearer token, and answers refusals as JSON."""

from __future__ import annotations

import hmac

from relax_core.engines.embedded.http.control_routes import ControlRoutes
from relax_core.engines.embedded.http.generate_route import GenerateRoute
from relax_core.engines.http_server import asgi
from relax_core.engines.http_server.asgi import ClientDisconnected, HttpError, Receive, Scope, Send

CONTROL_BODY_BYTES = 16 << 20


class EngineApp:
    """The ASGI application of one engine answers /generate and all control routes."""

    def __init__(self, generate: GenerateRoute, control: ControlRoutes, *, token: str) -> None:
        self._generate = generate
        self._control = control
        self._authorization = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        assert scope["type"] == "http"
        try:
            await self._route(scope, receive, send)
        except HttpError as error:
            await asgi.answer(send, asgi.error_payload(error.status, str(error)), status=error.status)
        except ClientDisconnected:
            pass

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._control.reporting and method == "GET":
            if self._has_token(scope):
                scope["connection"].showed_token()  # a new client does not replace it while it waits for the answer
            await asgi.answer(send, await self._control.reporting[path](b""))
        elif path == "/generate" and method == "POST":
            self._authorize(scope)
            await self._generate(scope, receive, send)
        elif path in self._control.changing and (method == "POST" or (path, method) == ("/flush_cache", "GET")):
            self._authorize(scope)
            body = await asgi.read_body(scope, receive, limit=CONTROL_BODY_BYTES)
            await asgi.answer(send, await self._control.changing[path](body))
        else:
            known = sorted({"/generate", *self._control.reporting, *self._control.changing})
            asked = asgi.clipped(f"{method} {path}")
            raise HttpError(404, f"{asked}: no such route; known: {', '.join(known)}")

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(asgi.headers(scope).get(b"authorization", b""), self._authorization)

    def _authorize(self, scope: Scope) -> None:
        if not self._has_token(scope):
            raise HttpError(401, f"{scope['path']}: wants the run's bearer token in the Authorization header")
        if not scope["connection"].showed_token():
            raise HttpError(503, f"{scope['path']}: too many requests are under way; ask again when some have ended")

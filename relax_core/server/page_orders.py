"""Lets the page of a run read and order its engines, and ask what the run waits for.

It reaches these routes of the gateway below an address of the page.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from relax_core.server.guard import refusal_answer
from relax_core.server.problems import Refusal

ADDRESS = "/api/gateway"  # the page's guard stands before it: session, Host and Origin
_BELOW, _STALL = "/rollout/", "/run/stall"  # the parts of the gateway that the page reaches


class PageOrders:
    """Passes the page's requests on to ``routes`` with the run's ``token``, which no browser gets to see.

    Every request but GET wants an Origin. The page's guard has refused those that are not ours, and a browser sends one
    with each request of a page that may change something, so no link and no form of another site gives an order.
    """

    def __init__(self, routes: ASGIApp, *, token: str) -> None:
        self._routes = routes
        self._authorization = (b"authorization", f"Bearer {token}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        path = scope["path"].removeprefix(ADDRESS)
        headers = [field for field in scope["headers"] if field[0].lower() not in (b"authorization", b"cookie")]
        refusal: Refusal | None = None
        if not path.startswith(_BELOW) and path != _STALL:
            refusal = Refusal("unknown-route", f"the page reaches the gateway's routes {_BELOW}… and {_STALL} alone")
        elif scope["method"] != "GET" and b"origin" not in {name.lower() for name, _ in headers}:
            refusal = Refusal("no-origin", "an order of the page names its Origin", key="Origin")
        if refusal is not None:
            await refusal_answer(refusal)(scope, receive, send)
            return
        whole = {**scope, "path": path, "raw_path": path.encode(), "headers": [*headers, self._authorization]}
        await self._routes(whole, receive, send)

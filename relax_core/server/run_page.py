"""Serves the page of the run beside the gateway's routes: its own addresses, behind its own guard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from relax_core.server.gateway_settings import GatewaySettings
from relax_core.server.page_guard import LOOPBACK_NAMES, Guard, Session
from relax_core.server.page_orders import ADDRESS, PageOrders
from relax_core.server.page_routes import Dashboard
from relax_core.server.run_reader import cache_folder

INDICES = "gateway"  # below the cache folder: `relax dashboard` may serve the same run with an index of its own
_BELOW = ("/api/", "/static/")


class RunPage:
    """Answers the page's addresses and passes all others on to ``routes``.

    A reader exchanges the link's token for the key of a session; the run's bearer token opens nothing here. The key
    opens the routes of engines and the report of what the run waits for below the page's own address, to the page alone
    (`PageOrders`), and no other route of the gateway.
    It follows from the run's token, so a gateway that was started again knows it.
    ``tell_link`` gets each new link, which works once.
    """

    def __init__(
        self, routes: ASGIApp, settings: GatewaySettings, *, port: int, tell_link: Callable[[str], None]
    ) -> None:
        self._routes = routes
        session = Session(hashlib.blake2b(b"the page of the run", key=settings.token.encode()).hexdigest())
        names = [*LOOPBACK_NAMES, *settings.hosts]
        url = f"http://{settings.host}:{port}"

        def tell() -> None:
            tell_link(f"{url}/#token={session.link_token}")

        self._dashboard = Dashboard(
            [Path(settings.folder)],
            cache=cache_folder() / INDICES,
            session=session,
            port=lambda: port,
            on_exchange=tell,
            names=names,
        )
        self._orders = Guard(PageOrders(routes, token=settings.token), session, port=lambda: port, names=names)
        tell()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        own = scope["path"] == "/" or scope["path"].startswith(_BELOW)
        page = self._orders if scope["path"].startswith(f"{ADDRESS}/") else self._dashboard.app
        await (page if own else self._routes)(scope, receive, send)

    def close(self) -> None:
        """Closes the index of the samples."""
        self._dashboard.close()

"""Runs the dashboard's server in a thread, for tests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from relax_core.server.http_server import HttpServer
from relax_core.server.page_routes import Page, page_app
from relax_core.server.request_guard import RequestGuard, Session

DEADLINE_S = 60.0


class Server:
    """Runs the page's server in a thread, and holds the key of a session."""

    def __init__(self, folder: Path) -> None:
        self.session = Session()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self.page = Page([folder], cache=None, session=self.session)
        self._server = HttpServer(
            RequestGuard(page_app(self.page), self.session, port=lambda: self.port), signals=False
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(listener)), daemon=True)
        self._thread.start()
        self.authorization = ""
        deadline = time.monotonic() + DEADLINE_S
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ask(self, path: str, *, data: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, method="POST" if data else "GET"
        )
        for name, value in ({"Authorization": self.authorization} | headers).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def enter(self) -> None:
        status, _, body = self.ask("/api/session", data=self.session.link_token.encode())
        assert status == 200
        self.authorization = f"Bearer {json.loads(body)['session']}"

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(DEADLINE_S)
        self.page.close()

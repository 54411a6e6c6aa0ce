"""Tests that the page's session belongs to one address and port, and that half-open connections are closed."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relax_core.engines import asgi_server as connections
from relax_core.server.run_folders import run_id
from tests.server.browser import CHROMIUM, opened_browser
from tests.server.made_run import make_run
from tests.server.page_server import Server

DEADLINE_S = 60.0
CREDENTIALS = ("cookie", "authorization")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(make_run(tmp_path_factory.mktemp("runs") / "run"))
    made.enter()
    yield made
    made.stop()


@pytest.fixture
def stranger() -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Runs another user's server on another port. Yields the port and the headers of each received request."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append({name.lower(): value for name, value in self.headers.items()})
            found = b"JSON.stringify({...sessionStorage, ...localStorage}) + document.cookie"
            body = b"<script>document.title = " + found + b"</script>"
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        yield listener.server_address[1], heard
        listener.shutdown()


def test_no_answer_sets_a_cookie_and_no_cookie_opens_anything(server: Server) -> None:
    key = server.authorization.removeprefix("Bearer ")
    for path, data in (("/", None), ("/api/session", server.session.link_token.encode()), ("/api/runs", None)):
        assert "set-cookie" not in {name.lower() for name in server.ask(path, data=data)[1]}
    for cookie in (key, f"session={key}", f"relax_dashboard_{server.port}={key}"):
        assert server.ask("/api/runs", Authorization="", Cookie=cookie)[0] == 401
    assert server.ask(f"/api/runs?session={key}", Authorization="")[0] == 401


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_a_server_on_another_port_gets_no_credential(
    server: Server, stranger: tuple[int, list[dict[str, str]]], tmp_path: Path
) -> None:
    port, heard = stranger
    ready = "document.querySelectorAll('#runs option').length"

    async def look() -> None:
        async with opened_browser(tmp_path) as page:
            address = f"http://127.0.0.1:{server.port}/"
            await page.call("Page.navigate", url=f"{address}#token={server.session.link_token}")
            await page.until(ready)
            assert await page.run("document.cookie") == ""
            await page.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
            await page.until("document.title")
            assert await page.run("document.title") == "{}"
            await page.call("Page.navigate", url=address)  # the tab still has its session
            await page.until(ready)
            assert await page.run("location.hash.includes('token')") is False
            await page.call("Page.reload")
            await page.until(ready)
            await page.run(f"fetch('http://127.0.0.1:{port}/', {{ mode: 'no-cors' }}).catch(() => null)")
            key = await page.run("sessionStorage.getItem('relax.session')")
            assert server.authorization == f"Bearer {key}"
            # A second tab shares the session of the first tab, because both have this address and port.
            await page.run("void (globalThis.second = window.open('about:blank', 'second'))")
            await page.run("second.sessionStorage.clear()")
            await page.run(f"second.location = '{address}'")
            await page.until("second.document.querySelectorAll('#runs option').length")

    asyncio.run(look())
    assert heard
    for headers in heard:
        assert not [name for name in CREDENTIALS if name in headers], headers


def ends_after(port: int, *parts: bytes, pause_s: float = 0.0) -> float:
    """Sends the parts, and returns the seconds until the server closes the connection."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as client:
        began = time.monotonic()
        for part in parts:
            client.sendall(part)
            time.sleep(pause_s)
        try:
            while client.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return time.monotonic() - began


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps 20 times per second, so all limits are a twentieth of the real server's limits."""
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


@pytest.mark.usefixtures("quick")
def test_half_open_connections_are_closed_and_a_followed_run_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    made = Server(run)
    try:
        made.enter()
        host = f"Host: 127.0.0.1:{made.port}\r\n".encode()
        line = f"GET /api/run/{run_id(run.resolve())}/stream HTTP/1.1\r\n".encode()
        with closing(socket.create_connection(("127.0.0.1", made.port), timeout=DEADLINE_S)) as follower:
            follower.sendall(line + host + f"Authorization: {made.authorization}\r\n\r\n".encode())
            began = time.monotonic()
            least = connections.HEAD_SWEEPS * connections.SWEEP_S
            for parts in ((b"",), (b"GET / HT",), (b"GET / HTTP/1.1\r\nHost: a\r\n",), (line + host,)):
                assert least / 2 < ends_after(made.port, *parts) < 12 * least, parts
            head = b"POST /api/session HTTP/1.1\r\n" + host + b"Content-Length: 4000\r\n\r\n"
            assert ends_after(made.port, head + b"x") < 2 * connections.BODY_SWEEPS * connections.SWEEP_S + 5
            answered = b"GET / HTTP/1.1\r\n" + host + b"\r\n"
            assert ends_after(made.port, answered) < 2 * connections.STRANGER_SWEEPS * connections.SWEEP_S + 5
            while time.monotonic() - began < 1.5 * connections.STRANGER_SWEEPS * connections.SWEEP_S:
                assert follower.recv(65536)
            follower.settimeout(DEADLINE_S)
            assert b"data: " in follower.recv(65536), "the stream of a reader with the key continues"
        assert made.ask("/api/runs")[0] == 200
    finally:
        made.stop()


def test_a_thousand_silent_strangers_keep_no_reader_out(server: Server) -> None:
    clients = []
    try:
        for _ in range(connections.connection_limit() + 50):
            clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S))
        assert json.loads(server.ask("/api/runs")[2])[0]["state"] == "finished"
    finally:
        for client in clients:
            client.close()


def test_the_kernel_notices_a_client_that_has_gone(server: Server) -> None:
    """The server enables TCP keepalive probes on connections."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)) as client:
        client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        assert client.recv(100)
        own = f"{client.getsockname()[1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        timers = [
            row[5].split(":")[0]
            for row in rows
            if row[2].endswith(f":{own}") and row[1].endswith(f":{server.port:04X}")
        ]
    assert timers == ["02"], "timer 2 of /proc/net/tcp is the keepalive timer"

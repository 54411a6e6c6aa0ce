"""Tests the engine's HTTP connections with slow, silent and many clients, on a small application."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

import pytest
import uvicorn
import uvloop

from relax_core.engines import asgi_server
from relax_core.engines.asgi_server import Connection, OpenConnections

READ_S = 60.0
GET = b"GET / HTTP/1.1\r\n\r\n"
TOKEN = b"authorization: token\r\n"
MANY = 8 << 20  # bytes, far more than fit into socket buffers


class Door:
    """Runs a server in a thread.

    The server answers GET at once. With the token, POST / waits for its body, /wait waits for `go`, and /much returns
    MANY bytes.
    """

    def __init__(self, limit: int) -> None:
        self.connections = OpenConnections(limit)
        self.disconnected: list[str] = []  # paths of requests with a disconnected client
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.go, self._stop = asyncio.Event(), asyncio.Event()
        config = uvicorn.Config(
            cast(Any, self._answer),
            http=cast("type[asyncio.Protocol]", partial(Connection, self.connections)),
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            log_level="error",
            timeout_keep_alive=3600,
        )
        self._server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        sweeping = asyncio.create_task(self.connections.sweep())
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await self._stop.wait()
        self._server.should_exit = self._server.force_exit = True
        await serving
        sweeping.cancel()

    async def _answer(self, scope: asgi_server.Scope, receive: asgi_server.Receive, send: asgi_server.Send) -> None:
        if dict(scope["headers"]).get(b"authorization") == b"token":
            if not scope["connection"].showed_token():
                await asgi_server.answer(send, {"full": True}, status=503)
                return
            try:
                if scope["path"] == "/wait":
                    await self.go.wait()
                elif scope["method"] == "POST":
                    await asgi_server.read_body(scope, receive, limit=1 << 30)
                elif scope["path"] == "/much":
                    await asgi_server.start_response(send, status=200, content_type=b"x", length=MANY)
                    for _ in range(MANY >> 16):
                        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                    self.disconnected += ["sent"] if (await receive())["type"] == "http.disconnect" else []
            except asgi_server.ClientDisconnected:
                self.disconnected.append(scope["path"])
                return
        await asgi_server.answer(send, {"ok": True})

    def stall(self, seconds: float) -> None:
        """Stops the server's event loop for some time."""
        self.loop.call_soon_threadsafe(time.sleep, seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60.0)
        assert not self._thread.is_alive()


class Client:
    """Holds a client's connection."""

    def __init__(self, port: int, sent: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(READ_S)
        self.send(sent)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> bytes:
        """Returns at least one byte of the response, or no byte if the server has closed the connection."""
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def to_end(self) -> bytes:
        found = b""
        while data := self.answer():
            found += data
        return found


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Door]]:
    """Starts a server with frequent sweeps and few connections. It has the same rules as the engine."""
    monkeypatch.setattr(asgi_server, "SWEEP_S", 0.02)
    monkeypatch.setattr(asgi_server, "KEPT_FREE", 2)
    opened: list[Door] = []

    def open_door(limit: int = 8, **changed: int) -> Door:
        for name, value in changed.items():
            monkeypatch.setattr(asgi_server, name, value)
        opened.append(Door(limit))
        return opened[-1]

    yield open_door
    for connection in opened:
        connection.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def open_one(door: Door, sent: bytes = b"") -> Client:
            client = Client(door.port, sent)
            stack.callback(client.socket.close)
            return client

        yield open_one


def test_a_head_that_never_ends_is_refused(door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    there = door()
    client = connect(there, b"GET / HTTP/1.1\r\nx: ")
    assert b" 408 " in client.to_end()
    assert connect(there, GET).answer().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nx: ",
        b"GET /",
        b"POST / HTTP/1.1\r\n" + TOKEN + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ",  # a trailer after the body
        b"POST / HTTP/1.1\r\n" + TOKEN + b"transfer-encoding: chunked\r\n\r\n5;x=",  # a chunk's extension
    ],
)
def test_a_head_that_grows_is_refused(start: bytes, door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    client = connect(door(SWEEP_S=3600), start)
    found = b""
    for _ in range(2000):  # up to 128 MB, if the server does not end the connection
        client.send(b"x" * (64 << 10))
        client.socket.settimeout(0.001)
        with suppress(TimeoutError):
            found = client.socket.recv(1 << 16)
            break
    assert b" 431 " in found and b"32768 bytes at most" in found


def test_a_large_head_in_one_piece_is_refused(door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    there = door()
    head = b"GET / HTTP/1.1\r\nx: " + b"a" * asgi_server.HEAD_BYTES + b"\r\n\r\n"
    assert b" 431 " in connect(there, head).answer()
    many = b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: a\r\n" % number for number in range(8000)) + b"\r\n"
    assert b" 431 " in connect(there, many).answer()
    just = b"GET / HTTP/1.1\r\nx: " + b"a" * (asgi_server.HEAD_BYTES - 100) + b"\r\n\r\n"
    assert b" 200 " in connect(there, just).answer()


def test_a_slow_body_is_refused_and_a_quick_one_is_not(
    door: Callable[..., Door], connect: Callable[..., Client], wait_until: Callable[..., None]
) -> None:
    there = door()
    head = b"POST / HTTP/1.1\r\n" + TOKEN + b"content-length: 1000000\r\n\r\n"
    slow, quick = connect(there, head + b"x"), connect(there, head + bytes(1000000))
    assert b" 200 " in quick.answer()
    assert b" 408 " in slow.to_end()
    wait_until(lambda: there.disconnected == ["/"], what="the end of the slow request")


def test_a_time_without_sweeps_is_held_against_nobody(
    door: Callable[..., Door], connect: Callable[..., Client]
) -> None:
    there = door(HEAD_SWEEPS=100)
    client = connect(there, b"GET / HTTP/1.1\r\n")
    there.stall(4.0)  # twice the time limit of the sweeps
    client.send(b"\r\n")
    assert b" 200 " in client.answer()


def test_quiet_strangers_go_and_who_knows_the_token_stays(
    door: Callable[..., Door], connect: Callable[..., Client]
) -> None:
    there = door()
    known = connect(there, b"GET / HTTP/1.1\r\n" + TOKEN + b"\r\n")
    waits = connect(there, b"GET /wait HTTP/1.1\r\n" + TOKEN + b"\r\n")
    stranger, silent = connect(there, GET), connect(there)
    assert b" 200 " in stranger.answer() and b" 200 " in known.answer()
    assert stranger.answer() == silent.answer() == b""  # disconnected
    known.send(GET)
    assert b" 200 " in known.answer()
    there.loop.call_soon_threadsafe(there.go.set)
    assert b" 200 " in waits.answer()


def test_who_does_not_read_is_hung_up_on(
    door: Callable[..., Door], connect: Callable[..., Client], wait_until: Callable[..., None]
) -> None:
    there = door()
    silent = connect(there, b"GET /much HTTP/1.1\r\n" + TOKEN + b"\r\n")
    wait_until(lambda: len(there.connections) == 0, what="the end of the connection")
    wait_until(lambda: there.disconnected == ["sent"], what="the end of the request")
    assert len(silent.to_end()) < MANY
    assert len(connect(there, b"GET /much HTTP/1.1\r\nconnection: close\r\n" + TOKEN + b"\r\n").answer()) > 0


def test_a_new_client_gets_the_place_of_the_quietest(door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    there = door(limit=4, SWEEP_S=3600)
    known = connect(there, b"GET / HTTP/1.1\r\n" + TOKEN + b"\r\n")
    waits = connect(there, b"GET /wait HTTP/1.1\r\n" + TOKEN + b"\r\n")
    known.answer()
    strangers = []
    for _ in range(20):
        strangers.append(connect(there, GET))
        assert b" 200 " in strangers[-1].answer()
    assert all(stranger.answer() == b"" for stranger in strangers[:-2]), "the oldest connections are closed"
    for stranger in (known, *strangers[-2:]):
        stranger.send(GET)
        assert b" 200 " in stranger.answer()
    strangers[-2].send(GET)  # now the older connection of the two is the more recently used one
    strangers[-2].answer()
    connect(there, GET).answer()
    assert strangers[-1].answer() == b""
    there.loop.call_soon_threadsafe(there.go.set)
    assert b" 200 " in waits.answer(), "a waiting request with the token is never disconnected"


def test_requests_under_way_leave_places_free(door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    there = door(limit=5, SWEEP_S=3600)
    wait = b"GET /wait HTTP/1.1\r\n" + TOKEN + b"\r\n"
    waiting = [connect(there, wait) for _ in range(3)]
    assert connect(there, GET).answer().startswith(b"HTTP/1.1 200"), "a liveness check is still answered"
    refused = connect(there, wait)
    assert b" 503 " in refused.answer()
    assert connect(there, GET).answer().startswith(b"HTTP/1.1 200")
    there.loop.call_soon_threadsafe(there.go.set)
    assert all(b" 200 " in stranger.answer() for stranger in waiting)
    refused.send(wait)
    assert b" 200 " in refused.answer(), "the waiting requests have ended"


def test_requests_before_the_first_answer_are_bounded(
    door: Callable[..., Door], connect: Callable[..., Client]
) -> None:
    there = door()
    few = connect(there, 8 * GET + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert few.to_end().count(b" 200 ") == 9
    assert connect(there, b"GET /wait HTTP/1.1\r\n" + TOKEN + b"\r\n" + 1000 * GET).to_end() == b""


@pytest.mark.parametrize("sent", [b"\0\1\2", b"CONNECT a:80 HTTP/1.1\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n", b"\xff" * 99])
def test_what_is_no_request_is_told_so(sent: bytes, door: Callable[..., Door], connect: Callable[..., Client]) -> None:
    assert b" 400 " in connect(door(), sent).answer()


def test_the_limit_is_of_the_files_that_the_process_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserved = asgi_server.BACKLOG + asgi_server.OTHER_FILES
    try:
        for soft, limit in ((asgi_server.MAX_CONNECTIONS + reserved + 9, asgi_server.MAX_CONNECTIONS), (700, 128)):
            if before[1] != resource.RLIM_INFINITY and before[1] < soft:
                continue
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            assert asgi_server.connection_limit() >= limit
            now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            assert now >= soft and asgi_server.connection_limit() <= max(128, now - reserved)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

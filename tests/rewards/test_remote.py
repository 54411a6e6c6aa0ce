"""Tests reward=remote with a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from relax_core.contracts.reward import RewardInput, RewardOutput, RewardUnusable
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_pool import RewardPool
from rewards.remote import RemoteConfig

LONG_S = 60.0


class Server(ThreadingHTTPServer):
    """Responds with ``replies`` in order and repeats the last reply. A reply is a status and a body, or None."""

    daemon_threads = True

    def __init__(self, *replies: tuple[int, bytes] | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = list(replies)
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.let_go = threading.Event()
        self.most = self.now = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked.append((json.loads(body), self.headers["Authorization"]))
            reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        if reply is None:
            self.server.let_go.wait(LONG_S)
            self.close_connection = True
            return
        with self.server.lock:
            self.server.now -= 1
        self.send_response(reply[0])
        self.send_header("Content-Length", str(len(reply[1])))
        self.end_headers()
        self.wfile.write(reply[1])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def make_server() -> Iterator[Any]:
    servers: list[Server] = []

    def make(*replies: tuple[int, bytes] | None) -> Server:
        servers.append(Server(*replies))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield make
    for server in servers:
        server.let_go.set()
        server.shutdown()
        server.server_close()


def score(
    url: str, *responses: str, timeout_s: float = LONG_S, concurrency: int = 8, row: Any = None, **more: Any
) -> list[RewardOutput]:
    spec = find_reward("remote")
    row = row or {"prompt": "p", "answer": "a", "level": 3}
    inputs = [RewardInput(response=text, stopped=True, answer="a", row=row) for text in responses]
    config = RemoteConfig(url=url, timeout_s=timeout_s, **more)
    with RewardPool(spec, config, workers=1, concurrency=concurrency) as pool:
        return asyncio.run(pool.score(inputs))


@pytest.mark.parametrize(
    ("body", "reward", "exact"),
    [
        (b"0.5", 0.5, False),
        (b"1", 1.0, True),
        (b'{"score": 0.25, "exact": true, "why": "so", "form": 1, "words": "x"}', 0.25, True),
        (b'{"reason": "no idea"}', None, False),
        (b"null", None, False),
        (b"NaN", None, False),
        (b"true", None, False),
        (b"[1]", None, False),
        (b"not json", None, False),
        (b"", None, False),
        (b"-2.5", -2.5, False),
        (b'{"score": 1, "exact": false}', 1.0, False),
        (b'{"score": "1"}', None, False),
        (b'{"score": 1e999}', None, False),
    ],
)
def test_what_a_server_answers(make_server: Any, body: bytes, reward: float | None, exact: bool) -> None:
    (output,) = score(make_server((200, body)).url, "r")
    assert (output.reward, output.exact) == (reward, exact)
    assert bool(output.reason) == (reward is None)
    if b"form" in body:
        assert output.parts is not None and output.parts["form"] == 1.0 and output.why == "so"


def test_what_a_server_is_asked(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server((200, b"1"))
    monkeypatch.setenv("MY_TOKEN", "secret")
    score(server.url, "r", token_env="MY_TOKEN")
    wanted = {"prompt": "p", "response": "r", "label": "a", "metadata": {"level": 3}}
    assert server.asked == [(wanted, "Bearer secret")]


def test_a_request_is_json_whatever_the_row_holds(make_server: Any) -> None:
    row = {
        "prompt": "p",
        "answer": "a",
        "nan": math.nan,
        "inner": [{"inf": -math.inf, "blob": b"\x00\xff"}, (math.nan, 1.5)],
        "array": np.array([1.0, math.inf]),
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        3: "three",
    }
    server = make_server((200, b"1"))
    score(server.url, "r", row=row)
    assert server.asked[0][0]["metadata"] == {
        "nan": None,
        "inner": [{"inf": None, "blob": "AP8="}, [None, 1.5]],
        "array": [1.0, None],
        "day": "2026-01-02",
        "price": "1.50",
        "3": "three",
    }


def test_a_server_that_is_busy_is_asked_again(make_server: Any) -> None:
    server = make_server((500, b"down"), (429, b"later"), (503, b"down"), (200, b"0.5"))
    assert score(server.url, "r")[0].reward == 0.5
    assert len(server.asked) == 4


def test_a_server_that_stays_down_gives_no_reward_in_time(make_server: Any) -> None:
    (output,) = score(make_server((500, b"it is down")).url, "r", timeout_s=0.5)
    assert output.reward is None and "status 500: it is down" in output.reason
    (output,) = score(make_server(None).url, "r", timeout_s=0.5)
    assert output.reward is None and "no answer within 0.5 s" in output.reason
    closed = make_server((200, b"1"))
    closed.shutdown()
    closed.server_close()
    (output,) = score(closed.url, "r", timeout_s=0.5)
    assert output.reward is None and closed.url in output.reason
    (output,) = score(make_server((200, b"1" * (2 << 20))).url, "r", timeout_s=3.0)
    assert output.reward is None and "more than 1,048,576 bytes" in output.reason


def test_a_refused_request_ends_the_run(make_server: Any) -> None:
    with pytest.raises(RewardUnusable, match=r"reward.url=http.*status 404: no such page.*Correct the URL"):
        score(make_server((404, b"no such page")).url, "r")


def test_no_more_requests_are_under_way_than_may_be(make_server: Any) -> None:
    server = make_server(None, None, (200, b"1"))
    threading.Timer(0.3, server.let_go.set).start()
    outputs = score(server.url, *"abcdef", concurrency=2)
    assert [output.reward for output in outputs] == [1.0] * 6 and server.most <= 4


def test_settings_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    check = find_reward("remote").check
    with pytest.raises(ValueError, match=r"reward.url='': the server's URL, such as reward.url=http://127"):
        check(RemoteConfig())
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"reward.token_env=NO_TOKEN: this environment variable is not set"):
        check(RemoteConfig(url="http://127.0.0.1:1/", token_env="NO_TOKEN"))

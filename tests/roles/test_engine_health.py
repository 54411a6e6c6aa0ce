"""An engine that runs and does not answer is killed; one that answers is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.roles import engine_owner as engine_health
from relax_core.roles.engine_owner import EngineHealth, how_it_ended

FROZEN_S = 4.0  # a machine may stand still for a while, and nobody is frozen

SERVER = """
import http.server, sys
STATUS = int(sys.argv[1])
class Ready(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(STATUS)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *words):
        print(self.path, flush=True)
server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_health, "ASK_S", 0.05)


def test_a_frozen_engine_is_killed_once_and_one_that_answers_never() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER, "200"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        kills: list[int] = []
        killed = threading.Event()

        def kill() -> None:
            kills.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            killed.set()

        client = EngineClient(url, "token", request_timeout_s=FROZEN_S, control_timeout_s=FROZEN_S, attached=True)
        health = EngineHealth(client, timeout_s=FROZEN_S, kill=kill)
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["/ready\n", "/ready\n"]
            assert health.frozen_s is None and not kills
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(120.0)
            assert process.wait(120.0) == -signal.SIGKILL
            assert kills == [process.pid]
            assert health.frozen_s is not None and health.frozen_s >= FROZEN_S
        finally:
            health.end()
            process.kill()


def test_an_engine_that_answers_with_a_refusal_is_still_looked_at() -> None:
    command = [sys.executable, "-c", SERVER, "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        killed = threading.Event()
        client = SglangClient(
            url,
            "token",
            request_timeout_s=FROZEN_S,
            control_timeout_s=FROZEN_S,
            ranks=1,
            vocab_size=50,
            seeds=True,
            attached=True,
        )
        health = EngineHealth(client, timeout_s=FROZEN_S, kill=killed.set)
        try:
            assert [process.stdout.readline() for _ in range(3)] == 3 * ["/ready\n"]
            assert not killed.is_set()
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(120.0)
        finally:
            health.end()
            process.kill()


def test_ends_in_words() -> None:
    assert how_it_ended(-9, frozen_s=None) == "was killed by SIGKILL"
    assert how_it_ended(1, frozen_s=None) == "ended with exit code 1"
    assert how_it_ended(-9, frozen_s=4.6) == "froze (no answer for 5 s) and was killed by SIGKILL"

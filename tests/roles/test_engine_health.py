"""An engine that lives and does not answer is killed; one that answers is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from relax_core.engines.client import EngineClient
from relax_core.engines.sglang.client import SglangClient
from relax_core.roles.engine_health import EngineHealth, how_it_ended

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

        client = EngineClient(url, "token", request_timeout_s=1.0, control_timeout_s=1.0)
        health = EngineHealth(client, timeout_s=1.0, kill=kill)
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["/ready\n", "/ready\n"]
            assert health.frozen_s is None and not kills
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(30.0)
            assert process.wait(30.0) == -signal.SIGKILL
            assert kills == [process.pid]
            assert health.frozen_s is not None and health.frozen_s >= 1.0
        finally:
            health.end()
            process.kill()


def test_an_engine_that_answers_with_a_refusal_is_still_looked_at() -> None:
    command = [sys.executable, "-c", SERVER, "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        killed = threading.Event()
        client = SglangClient(url, "token", request_timeout_s=1.0, control_timeout_s=1.0, ranks=1, seeds=True)
        health = EngineHealth(client, timeout_s=1.0, kill=killed.set)
        try:
            assert [process.stdout.readline() for _ in range(3)] == 3 * ["/ready\n"]
            assert not killed.is_set()
            os.kill(process.pid, signal.SIGSTOP)
            assert killed.wait(30.0)
        finally:
            health.end()
            process.kill()


def test_ends_in_words() -> None:
    assert how_it_ended(-9, frozen_s=None) == "was killed by SIGKILL"
    assert how_it_ended(1, frozen_s=None) == "ended with exit code 1"
    assert how_it_ended(-9, frozen_s=4.6) == "froze (no answer for 5 s) and was killed by SIGKILL"

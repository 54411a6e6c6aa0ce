"""Another user can neither take the port at which the raylet asks for its agent, nor start that agent."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_core.control.host import agent_on_demand
from tests.security.conftest import SecondUser

# It binds in the way of Ray's agent, writes its port where Ray's does, and answers each request with its process id.
AGENT = """
import http.server, os, sys, time
port_file, port = sys.argv[1], int(sys.argv[2].partition("=")[2])
time.sleep(0.5)  # Ray's agent imports for a second before it binds its port

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
with open(f"{port_file}.new", "w") as file:
    file.write(str(server.server_address[1]))
os.replace(f"{port_file}.new", port_file)
server.serve_forever()
"""
RAYLET = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
# It connects once, which started the agent of earlier versions, and then tries to bind the port for two seconds.
INTRUDER = """
import socket, sys, time
port, bound = int(sys.argv[1]), 0
with socket.socket() as client:
    client.connect(("127.0.0.1", port))
    client.settimeout(2)
    try:
        answered = client.recv(1) != b""
    except OSError:
        answered = False
until = time.monotonic() + 2
while time.monotonic() < until:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            thief.bind(("127.0.0.1", port))
            bound += 1
        except OSError:
            pass
print(answered, bound)
"""


@contextmanager
def stand_in(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """Runs the stand-in below a process that plays the raylet; yields its port, that process and the port file."""
    port_file, agent = folder / "port", folder / "agent.py"
    agent.write_text(AGENT)
    words = ["--node-ip-address=127.0.0.1", sys.executable, str(agent), str(port_file)]
    command = [sys.executable, "-I", "-S", agent_on_demand.__file__, str(port_file), *words[1:]]
    command += ["--runtime-env-agent-port=0", words[0]]
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET, *command])
    try:
        until = time.monotonic() + 30
        while not port_file.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        yield int(port_file.read_text()), raylet, port_file
    finally:
        raylet.kill()
        raylet.wait(10)


def ask(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as reply:
        return int(reply.read())


def test_the_port_stays_bound_while_the_agent_starts_and_runs(tmp_path: Path, second_user: SecondUser) -> None:
    with stand_in(tmp_path) as (port, _, _), second_user.popen(INTRUDER, port) as intruder:
        time.sleep(0.3)  # the intruder has connected by now, and tries to bind the port
        first = ask(port)
        assert ask(port) == first, "the same agent answers"
        output, _ = intruder.communicate(timeout=30)
        assert output.split() == ["False", "0"]


def test_a_connection_of_another_user_starts_no_agent(tmp_path: Path, second_user: SecondUser) -> None:
    with stand_in(tmp_path) as (port, raylet, port_file):
        done = second_user.run(INTRUDER, port)
        assert done.stdout.split() == ["False", "0"]
        assert port_file.read_text() == str(port), "the agent would have written its own"
        assert raylet.poll() is None


def test_it_ends_with_the_raylet(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    with stand_in(tmp_path) as (port, raylet, _):
        agent = ask(port)
        raylet.kill()
        raylet.wait(10)
        wait_until(lambda: not Path(f"/proc/{agent}").exists(), what="the end of the agent", timeout_s=20)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_found(host: str) -> None:
    import os
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as connection,
    ):
        assert agent_on_demand.uid_of_client(connection) == os.getuid()

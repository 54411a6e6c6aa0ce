"""Tests that no other user can take a port of the run's Ray, at its start or when Ray's agent takes over a port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from relax_core.control.host import agent_on_demand
from tests.security.conftest import SecondUser

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0
# Binds its port like Ray's agent, after slow imports, and answers each connection with its arguments.
AGENT = """
import socket, sys, time
time.sleep(0.5)
port = int(next(word.partition("=")[2] for word in sys.argv if word.startswith("--runtime-env-agent-port=")))
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
assert listener.getsockname()[1] == port
time.sleep(0.2)
listener.listen(10)
while True:
    connection, _ = listener.accept()
    connection.sendall((sys.argv[0] + " " + sys.argv[-1]).encode())
    connection.close()
"""
# Connects to a port repeatedly, and tries to bind this port in every way until stdin is closed. Prints its successes.
THIEF = """
import select, socket, sys
port, taken, refused = int(sys.argv[1]), 0, 0
ways = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
print("at work", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):
        for options in ways:
            thief = socket.socket(family)
            for option in options:
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                thief.bind((host, port))
                taken += 1
            except OSError:
                refused += 1
            thief.close()
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        pass
print(taken, refused)
"""
# Connects to every new listening socket of user 0 on loopback, and tries to bind the socket's port.
RAIDER = """
import select, socket, sys
seen = set()
print("at work", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in list(open(table))[1:]:
            fields = row.split()
            if fields[3] != "0A" or fields[7] != "0":
                continue
            port = int(fields[1].rpartition(":")[2], 16)
            seen.add(port)
            for attempt in ("connect", "bind"):
                raider = socket.socket()
                raider.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                raider.settimeout(0.05)
                try:
                    if attempt == "connect":
                        raider.connect(("127.0.0.1", port))
                        raider.sendall(b"POST /get_or_create_runtime_env HTTP/1.1\\r\\n\\r\\n")
                    else:
                        raider.bind(("127.0.0.1", port))
                        raider.listen()
                        held = globals().setdefault("held", [])
                        held.append(raider)
                        continue
                except OSError:
                    pass
                raider.close()
print(len(seen), len(globals().get("held", [])))
"""
SESSION = """
import json, sys, time
from pathlib import Path
from relax_core.config.compose import load_config
from relax_core.control.host.run_paths import run_paths
from relax_core.control.host.ray_session import RaySession

logs = Path(sys.argv[1])
with run_paths(run_dir=logs.parent) as paths:
    started = time.monotonic()
    with RaySession(load_config([]).launcher, paths, log_dir=logs):
        started = time.monotonic() - started
        import os, ray

        @ray.remote(num_cpus=0, runtime_env={"env_vars": {"RELAX_VARIED": "of its own"}})
        def varied():
            return os.environ["RELAX_VARIED"]

        print(json.dumps([ray.get(varied.remote(), timeout=60), started]), flush=True)
"""


@contextmanager
def stand_in(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yields the process that replaces Ray's agent (the program above), and its port."""
    port_file, program = tmp_path / "port", tmp_path / "agent.py"
    program.write_text(AGENT)
    agent = [sys.executable, "-u", str(program), "--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0", "--last"]
    path = str(agent_on_demand.__file__)
    with subprocess.Popen([sys.executable, "-I", "-S", path, str(port_file), *agent]) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not port_file.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            yield process, int(port_file.read_text())
        finally:
            process.kill()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def ask(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as asking:
        answer = b""
        while part := asking.recv(1024):
            answer += part
        return answer.decode()


def test_the_first_connection_is_answered_by_the_agent_under_its_own_name(tmp_path: Path) -> None:
    with stand_in(tmp_path) as (process, port):
        pid = process.pid
        assert ask(port) == f"{tmp_path / 'agent.py'} --last", "the first connection must be answered"
        assert ask(port) == f"{tmp_path / 'agent.py'} --last"
        assert process.pid == pid and process.poll() is None, "the raylet's child must become the agent"


def test_no_other_user_can_bind_the_port_or_start_the_agent(tmp_path: Path, second_user: SecondUser) -> None:
    with stand_in(tmp_path) as (process, port), second_user.popen(THIEF, port) as thief:
        assert thief.stdout is not None and thief.stdin is not None
        assert thief.stdout.readline() == "at work\n"
        time.sleep(1.0)
        assert "--inherited-listener" not in command_line(process.pid), "another user started Ray's agent"
        assert command_line(process.pid).split()[1:3] == ["-I", "-S"], "another user started Ray's agent"
        started = time.monotonic()
        assert ask(port).endswith("--last")
        assert ask(port).endswith("--last")
        assert time.monotonic() - started < 5.0
        thief.stdin.write("end\n")
        thief.stdin.flush()
        taken, refused = map(int, thief.stdout.readline().split())
        assert (taken, refused > 100) == (0, True)


def test_the_port_stays_bound_while_the_agent_starts(tmp_path: Path) -> None:
    """Repeats the attack without a second user: a socket without port sharing can never bind the port."""
    ended, taken = threading.Event(), []

    def bind_again_and_again(port: int) -> None:
        while not ended.is_set():
            for options in ((), (socket.SO_REUSEADDR,)):
                with closing(socket.socket()) as thief:
                    for option in options:
                        thief.setsockopt(socket.SOL_SOCKET, option, 1)
                    try:
                        thief.bind(("127.0.0.1", port))
                    except OSError:
                        continue
                    taken.append(options)

    with stand_in(tmp_path) as (_, port):
        thread = threading.Thread(target=bind_again_and_again, args=[port])
        thread.start()
        try:
            assert ask(port).endswith("--last")
        finally:
            ended.set()
            thread.join(WAIT_S)
    assert taken == []


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_user_of_a_connection_is_the_kernels_word(family: int, host: str) -> None:
    with closing(socket.socket(family)) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        listener.listen()
        assert agent_on_demand.users_of_clients(listener) == set()
        with socket.create_connection(listener.getsockname()[:2], WAIT_S):
            assert agent_on_demand.users_of_clients(listener) == {os.geteuid()}


def test_a_connection_of_ipv6_to_an_address_of_ipv4_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(socket.socket(socket.AF_INET6)) as client:
        try:
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        except OSError:
            pytest.skip("no IPv6 on this machine")
        assert agent_on_demand.users_of_clients(listener) == {os.geteuid()}


def test_ray_starts_while_another_user_raids_every_port(tmp_path: Path, second_user: SecondUser) -> None:
    with tempfile.TemporaryDirectory(prefix="rp") as name, second_user.popen(RAIDER) as raider:
        assert raider.stdout is not None and raider.stdin is not None
        assert raider.stdout.readline() == "at work\n"
        done = subprocess.run(
            [sys.executable, "-c", SESSION, str(tmp_path / "logs")],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": name},
            capture_output=True,
            text=True,
            timeout=120,
        )
        raider.stdin.write("end\n")
        raider.stdin.flush()
        ports, _ = map(int, raider.stdout.readline().split())
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])[0] == "of its own"
        assert ports >= 4, "the raider must reach GCS, raylet, the stand-in and a worker"

"""Another user can neither join the trainer's ranks, nor send them anything that they read."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from relax_core.contracts.host.socket_owners import admit_clients, clients, listeners, refuse_clients
from relax_core.weights.rendezvous import SignedStore, open_rank_store
from tests.ports import free_port
from tests.security.conftest import INTRUDER, SecondUser

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
from tests.train.worker_group_layouts import parallel_config
from relax_core.train.parallel import process_group
from relax_core.contracts.host.socket_owners import listeners

rank, address, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
began = time.monotonic()
process_group.join(
    parallel_config(dp=2), rank=rank, world_size=2, store_address=address, token="secret", timeout_s=60.0, seed=0
)
print(json.dumps({"joined": time.monotonic() - began, "ports": sorted(listeners())}), flush=True)
sys.stdin.readline()
slowest = 0.0
for _ in range(steps):
    began = time.monotonic()
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]
    slowest = max(slowest, time.monotonic() - began)
print(json.dumps({"slowest": slowest}), flush=True)
"""
# It connects to a port as often as it may, and says in each connection that it is pair 0, 1, 2, …
FLOOD = """
import json, socket, struct, sys, time
kept, connected = [], 0
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    for port in json.loads(sys.argv[1]):
        one = socket.socket()
        one.settimeout(0.2)
        try:
            one.connect(("127.0.0.1", port))
            one.sendall(struct.pack("<q", connected))
            connected += 1
            kept.append(one)
        except OSError:
            one.close()
print(connected)
"""
# It connects to each new listening port of the victim as soon as the kernel shows it.
HIJACKER = """
import select, socket, struct, sys, time
victim, kept, connected = sys.argv[1], {}, 0
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until and not select.select([sys.stdin], [], [], 0)[0]:
    for line in open("/proc/net/tcp").readlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        if fields[3] != "0A" or fields[7] != victim or port in kept or not host.endswith("7F"):
            continue
        kept[port] = []
        for number in range(64):
            try:
                one = socket.create_connection(("127.0.0.1", int(port, 16)), 0.05)
                one.sendall(struct.pack("<q", number))
                kept[port].append(one)
                connected += 1
            except OSError:
                break
print(connected)
"""


def start_ranks(address: str, *, steps: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), address, str(steps)],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_ranks_join_and_no_port_of_theirs_takes_another_user(tmp_path: Path, second_user: SecondUser) -> None:
    """They go on at the same pace while another user connects as often as the system allows."""
    ranks = start_ranks(str(tmp_path / "store"), steps=100)
    joined = []
    for one in ranks:
        assert one.stdout is not None
        line = one.stdout.readline()
        assert line, one.communicate()[1]
        joined.append(json.loads(line))
    ports = sorted({port for one in joined for port in one["ports"]})
    assert len(ports) == 2, "gloo alone listens"
    with second_user.popen(FLOOD, json.dumps(ports), 3.0) as flood:
        for one in ranks:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        ended = [one.communicate(timeout=60) for one in ranks]
        output, _ = flood.communicate(timeout=60)
    assert [one.returncode for one in ranks] == [0, 0], ended
    assert output.split() == ["0"]
    assert max(json.loads(out)["slowest"] for out, _ in ended) < 1.0


def test_a_user_who_connects_while_ranks_join_is_named_and_not_read(tmp_path: Path, second_user: SecondUser) -> None:
    """The ranks end with a reason, or join without the other user; they never take data from that user."""
    with second_user.popen(HIJACKER, os.getuid()) as hijacker:
        assert hijacker.stdout is not None
        assert hijacker.stdout.readline() == "ready\n"
        ranks = start_ranks(str(tmp_path / "store"), steps=1)
        ended = [one.communicate("\n", timeout=120) for one in ranks]
        output, _ = hijacker.communicate("\n", timeout=60)
    for one, (_, errors) in zip(ranks, ended, strict=True):
        if one.returncode != 0:
            assert "ForeignRank" in errors or "Connection closed by peer" in errors or "timed out" in errors.lower()
    if int(output) and any(one.returncode for one in ranks):
        assert any(f"user {INTRUDER}" in errors for _, errors in ended), ended


def opened(port: int, token: str) -> list[dist.Store]:
    """Both ranks' stores."""
    stores: dict[int, dist.Store] = {}

    def join(rank: int) -> None:
        stores[rank] = open_rank_store(f"127.0.0.1:{port}", token=token, rank=rank, world_size=2, timeout_s=20.0)

    threads = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    return [stores[0], stores[1]]


def test_a_store_without_the_token_reads_and_changes_nothing() -> None:
    port = free_port()
    first, second = opened(port, "secret")
    first.set("address", "a")
    assert second.get("address") == b"a" and second.check(["address"])
    intruder = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    assert not intruder.check(["address"])
    intruder.set("address", "b")
    intruder.set("arrived", "7")
    other = SignedStore(intruder, key=b"guessed")
    other.set("address", "b")
    assert not other.delete_key("nothing") and second.get("address") == b"a" and first.add("count", 2) == 2
    assert second.add("count", 1) == 3
    name = second._name("address")  # type: ignore[attr-defined]  # even a name that leaked is of no use
    intruder.set(name, intruder.get(name)[:-1] + b"x")
    with pytest.raises(RuntimeError, match="not written by a rank"):
        second.get("address")


def test_a_rank_of_another_run_is_not_counted() -> None:
    address = f"127.0.0.1:{free_port()}"
    caught: list[str] = []

    def join(rank: int, token: str) -> None:
        try:
            open_rank_store(address, token=token, rank=rank, world_size=2, timeout_s=2.0)
        except TimeoutError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=join, args=[rank, token]) for rank, token in enumerate("ab")]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert len(caught) == 2 and all("all 2 ranks" in one for one in caught)


def test_a_listener_that_refuses_clients_answers_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listeners()[port]
        with socket.create_connection(("127.0.0.1", port)):
            assert [one.uid for one in clients(port)] == [os.getuid()]
            refuse_clients(descriptor)
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.3)
            admit_clients(descriptor)
            socket.create_connection(("127.0.0.1", port), 5).close()
        listener.accept()[0].close()


def test_a_file_store_is_named_at_random_in_the_private_folder(tmp_path: Path) -> None:
    path = tmp_path / f"ranks-{secrets.token_hex(8)}"
    store = open_rank_store(str(path), token="", rank=0, world_size=1, timeout_s=5.0)
    store.set("a", "b")
    assert path.exists() and store.get("a") == b"b"

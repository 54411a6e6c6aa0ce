"""Tests that another user cannot join the trainer's ranks, and cannot send data that the ranks read."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from relax_core.contracts.host_network import admit_clients, clients, listeners, refuse_clients
from relax_core.weights.weight_group import SignedStore, open_rank_store
from tests.ports import free_port
from tests.security.conftest import INTRUDER, SecondUser

ROOT = Path(__file__).resolve().parents[2]
# Opens several connections to each port and keeps them open. Each connection sends the number of a pair of ranks, as a
# rank would. Prints the number of connections.
INTRUDER_PROGRAM = """
import socket, struct, sys
kept = []
for port in map(int, sys.argv[2:]):
    for number in range(int(sys.argv[1])):
        link = socket.socket()
        link.settimeout(0.3)
        try:
            link.connect(("127.0.0.1", port))
            link.sendall(struct.pack("<q", number))
        except OSError:
            continue
        kept.append(link)
print(len(kept), flush=True)
sys.stdin.readline()
"""


@contextmanager
def ranks(address: str, *, tokens: tuple[str, str] = ("a", "a"), open_s: float = 0.0) -> Iterator[list[Any]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.security.store_rank", str(rank), address, tokens[rank], str(open_s)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def said(process: Any) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, "the rank ended without a message"
    answer: dict[str, Any] = json.loads(line)
    return answer


def go_on(started: list[Any]) -> None:
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()


def test_another_user_reaches_no_port_of_connected_ranks_and_delays_none(
    second_user: SecondUser, tmp_path: Path
) -> None:
    with ranks(str(tmp_path / "store")) as started:
        ports = [port for process in started for port in said(process)["ports"]]
        assert len(ports) == 2
        with second_user.popen(INTRUDER_PROGRAM, 4, *ports) as intruder:
            assert intruder.stdout is not None
            assert intruder.stdout.readline().strip() == "0"
            go_on(started)
            answers = [said(process) for process in started]
            intruder.kill()
    for answer in answers:
        assert answer["gathered"] == [{"rank": 0}, {"rank": 1}] and answer["slowest"] < 1.0


def test_another_user_in_the_place_of_a_rank_ends_the_group_before_it_carries_data(
    second_user: SecondUser, tmp_path: Path
) -> None:
    with ranks(str(tmp_path / "store"), open_s=3.0) as started:
        ports = [port for process in started for port in said(process)["ports"]]
        go_on(started)
        with second_user.popen(INTRUDER_PROGRAM, 64, *ports) as intruder:
            assert intruder.stdout is not None
            assert int(intruder.stdout.readline()) > 0
            answers = []
            for process in started:
                answers.append(said(process))
                process.kill()
            intruder.kill()
    assert not any("gathered" in answer for answer in answers)
    assert any(answer["error"] == "UntrustedRank" and str(INTRUDER) in answer["text"] for answer in answers), answers


@pytest.mark.parametrize("tokens", [("a", "b"), ("", "a")])
def test_a_rank_without_the_token_joins_no_group(tmp_path: Path, tokens: tuple[str, str]) -> None:
    with ranks(str(tmp_path / "store"), tokens=tokens) as started:
        answers = [said(process) for process in started]
    assert "UntrustedRank" in [answer.get("error") for answer in answers], answers
    assert not any("ports" in answer for answer in answers)


def test_ranks_of_several_hosts_join_by_a_signed_store() -> None:
    with ranks(f"127.0.0.1:{free_port()}") as started:
        for process in started:
            assert said(process)["ports"]
        go_on(started)
        assert [said(process)["gathered"] for process in started] == [[{"rank": 0}, {"rank": 1}]] * 2


def opened(port: int, token: str) -> list[dist.Store]:
    """Returns the stores of both ranks."""
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
    intruder = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    assert not intruder.check(["address"])
    intruder.set("address", "b")
    intruder.set("arrived", "7")
    guessing = SignedStore(intruder, key=b"guessed")
    guessing.set("address", "b")
    assert not guessing.delete_key("nothing") and second.get("address") == b"a" and first.add("count", 2) == 2
    assert second.add("count", 1) == 3
    name = second._name("address")  # type: ignore[attr-defined]  # as if the key's hidden name had leaked
    changed = intruder.get(name)[:-1] + b"\0x"
    intruder.set(name, changed)
    assert intruder.get(name) == changed  # `set` returns before the store has the value
    with pytest.raises(RuntimeError, match="not written by a rank"):
        second.get("address")


@pytest.mark.parametrize("waits_s", [(2.0, 2.0), (1.0, 30.0), (2.0, 1.0)], ids=["both", "rank 0 first", "rank 1 first"])
def test_a_rank_of_another_run_is_not_counted(waits_s: tuple[float, float]) -> None:
    address = f"127.0.0.1:{free_port()}"
    caught: list[str] = []

    def join(rank: int, token: str) -> None:
        try:
            open_rank_store(address, token=token, rank=rank, world_size=2, timeout_s=waits_s[rank])
        except TimeoutError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=join, args=[rank, token]) for rank, token in enumerate("ab")]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert len(caught) == 2 and all("all 2 ranks" in text for text in caught)


def test_a_listener_that_refuses_clients_answers_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listeners()[port]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            assert [client.uid for client in clients(port)] == [os.getuid()]
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

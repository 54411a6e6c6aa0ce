"""Heartbeats of real Ray actors that are stopped, killed and restarted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.monitor import LONGEST_GAP_S
from relax_core.contracts.process_trees import process_state
from relax_core.control.worker_health import Beat, Heartbeats
from relax_core.roles.worker import WorkerStatus

DEADLINE_S = 120.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StatusOnly:
    """A worker that only answers its status. Its start waits for the file ``gate``."""

    def __init__(self, gate: Path | None) -> None:
        while gate is not None and not gate.exists():
            time.sleep(0.01)

    def status(self) -> WorkerStatus:
        return WorkerStatus(name="status-0", state="running", since=0.0, pid=os.getpid(), detail="", error=None)


@pytest.fixture
def start(ray_session: str) -> Iterator[Callable[..., Any]]:
    import ray

    started: list[Any] = []

    def start(max_restarts: int, *, gate: Path | None = None) -> Any:
        started.append(ray.remote(StatusOnly).options(num_cpus=0, max_restarts=max_restarts).remote(gate))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def until(heartbeats: Heartbeats, actor: Any, condition: Callable[[Beat], bool]) -> Beat:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(beat := heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"]):
        assert time.monotonic() < deadline, beat
    return beat


def is_alive(beat: Beat) -> bool:
    return beat.life == "alive" and beat.silent_s == 0.0


def stop(heartbeats: Heartbeats, actor: Any, pid: int) -> None:
    """Stops the process while a call to it waits for an answer."""
    os.kill(pid, signal.SIGSTOP)
    until(heartbeats, actor, lambda beat: process_state(pid) == "stopped" and "status-0" in heartbeats._asked)


def pid_of(beat: Beat) -> int:
    assert beat.status is not None
    return beat.status.pid


def test_a_stopped_process_is_silent_and_speaks_again(start: Callable[..., Any]) -> None:
    clock = Clock()
    heartbeats, actor = Heartbeats(clock=clock), start(0)
    pid = pid_of(until(heartbeats, actor, is_alive))
    try:
        stop(heartbeats, actor, pid)
        for _ in range(3):
            clock.now += 1.0
            silent = heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"]
        assert (silent.life, silent.silent_s) == ("alive", 3.0)
        clock.now += 3600.0  # this process itself was paused, which does not count as silence
        assert heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"].silent_s == 3.0 + LONGEST_GAP_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pid_of(until(heartbeats, actor, is_alive)) == pid


def test_a_killed_process_is_dead_or_restarts(start: Callable[..., Any]) -> None:
    heartbeats, actor = Heartbeats(), start(1)
    first = pid_of(until(heartbeats, actor, is_alive))
    stop(heartbeats, actor, first)  # a call is then open, whose failure reports the restart
    os.kill(first, signal.SIGKILL)
    restarting = until(heartbeats, actor, lambda beat: beat.life == "restarting")
    assert pid_of(restarting) == first
    second = pid_of(until(heartbeats, actor, is_alive))
    assert second != first
    os.kill(second, signal.SIGKILL)
    dead = until(heartbeats, actor, lambda beat: beat.life == "dead")
    assert dead.cause and pid_of(dead) == second


def test_a_process_that_has_not_answered_yet_is_starting_and_never_silent(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    clock, gate = Clock(), tmp_path / "gate"
    heartbeats, actor = Heartbeats(clock=clock), start(0, gate=gate)
    for _ in range(2):
        beat = heartbeats.poll({"status-0": actor}, timeout_s=0.0)["status-0"]
        assert (beat.life, beat.silent_s) == ("starting", 0.0)
        clock.now += 100.0
    gate.touch()
    until(heartbeats, actor, is_alive)

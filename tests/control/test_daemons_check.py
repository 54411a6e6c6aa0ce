"""Tests the check of Ray's daemons. Real processes that die or freeze replace the daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from relax_core.contracts.monitor import Monitor
from relax_core.control.host.ray_session import daemons_check

DEADLINE_S = 60.0
LONG_S = 3600.0


class Lost:
    def __init__(self) -> None:
        self.causes: list[str] = []
        self.reported = threading.Event()

    def __call__(self, cause: str) -> None:
        self.causes.append(cause)
        self.reported.set()


@pytest.fixture
def daemons() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started = {name: subprocess.Popen(["sleep", "600"]) for name in ("GCS", "raylet")}
    yield started
    for process in started.values():
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("name", ["GCS", "raylet"])
def test_the_death_of_a_zombie_is_reported(name: str, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    lost = Lost()
    pids = {daemon: process.pid for daemon, process in daemons.items()}
    with Monitor([daemons_check(lambda: pids, LONG_S, lost=lost)]):
        os.kill(daemons[name].pid, signal.SIGKILL)
        assert lost.reported.wait(DEADLINE_S)
    assert lost.causes == [f"Ray's {name} died"]


def test_a_freeze_is_reported_after_its_timeout(daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    lost = Lost()
    pid = daemons["GCS"].pid
    with Monitor([daemons_check(lambda: {"GCS": pid}, 1.0, lost=lost)]):
        os.kill(pid, signal.SIGSTOP)
        assert lost.reported.wait(DEADLINE_S)
    assert lost.causes[0].startswith("Ray's GCS froze (it was stopped for ")


def test_the_end_of_the_run_is_no_loss(daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    lost = Lost()
    with Monitor([daemons_check(lambda: {"raylet": daemons["raylet"].pid}, LONG_S, lost=lost)]) as monitor:
        pass
    daemons["raylet"].kill()
    daemons["raylet"].wait(DEADLINE_S)
    assert not any(thread.is_alive() for thread in monitor._threads) and lost.causes == []

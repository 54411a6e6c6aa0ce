"""Tests the check that kills stopped processes of the run, with real stopped processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.contracts.monitor import Elapsed, Monitor
from relax_core.contracts.process_trees import process_state
from relax_core.control.stopped_processes import GRACE_S, StoppedProcesses

DEADLINE_S = 60.0
FROZEN_S = 2.0
SLEEPS = "import time; time.sleep(600)"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watch:
    def __init__(self) -> None:
        self.clock, self.lines = Clock(), list[str]()
        stopped = StoppedProcesses(
            os.getpid(), frozen_after_s=FROZEN_S, report=self.lines.append, elapsed=Elapsed(self.clock)
        )
        self.monitor = Monitor([stopped.check()], clock=self.clock)

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += 1.0
            self.monitor.tick()


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    watch.monitor.tick()
    return watch


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(DEADLINE_S)


def stopped_process(started: list[subprocess.Popen[bytes]], *words: str) -> int:
    started.append(subprocess.Popen([sys.executable, "-c", SLEEPS, *words]))
    os.kill(started[-1].pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while process_state(started[-1].pid) != "stopped":
        assert time.monotonic() < deadline
    return started[-1].pid


def test_a_process_of_the_run_is_killed_after_its_time(watch: Watch, started: list[subprocess.Popen[bytes]]) -> None:
    pid = stopped_process(started, "relax_core.somewhere")
    watch.seconds(1 + int(FROZEN_S + GRACE_S))
    assert process_state(pid) == "stopped" and not watch.lines
    watch.seconds(1)
    assert started[0].wait(DEADLINE_S) == -signal.SIGKILL
    watch.seconds(10)
    assert len(watch.lines) == 1 and str(pid) in watch.lines[0] and "relax_core.somewhere" in watch.lines[0]


def test_a_process_that_goes_on_in_time_begins_anew(watch: Watch, started: list[subprocess.Popen[bytes]]) -> None:
    pid = stopped_process(started, "relax_core.somewhere")
    watch.seconds(4)
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + DEADLINE_S
    while process_state(pid) == "stopped":
        assert time.monotonic() < deadline
    watch.seconds(1)
    os.kill(pid, signal.SIGSTOP)
    while process_state(pid) != "stopped":
        assert time.monotonic() < deadline
    watch.seconds(4)
    assert process_state(pid) == "stopped" and not watch.lines


def test_programs_of_the_user_stay(watch: Watch, started: list[subprocess.Popen[bytes]]) -> None:
    pid = stopped_process(started, "an agent of somebody")
    watch.seconds(30)
    assert process_state(pid) == "stopped" and not watch.lines


def test_a_pause_of_the_supervisor_does_not_count(watch: Watch, started: list[subprocess.Popen[bytes]]) -> None:
    pid = stopped_process(started, "relax_core.somewhere")
    watch.seconds(1)
    watch.clock.now += 3600.0
    watch.monitor.tick()
    assert process_state(pid) == "stopped" and not watch.lines


def test_a_child_of_a_child_is_found(watch: Watch, started: list[subprocess.Popen[bytes]]) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}, 'relax_core.below'])"
    started.append(subprocess.Popen([sys.executable, "-c", code]))
    deadline = time.monotonic() + DEADLINE_S
    children = Path(f"/proc/{started[0].pid}/task/{started[0].pid}/children")
    while not (below := children.read_text().split()):
        assert time.monotonic() < deadline
    os.kill(int(below[0]), signal.SIGSTOP)
    while process_state(int(below[0])) != "stopped":
        assert time.monotonic() < deadline
    watch.seconds(10)
    assert started[0].wait(DEADLINE_S) == 0
    assert len(watch.lines) == 1

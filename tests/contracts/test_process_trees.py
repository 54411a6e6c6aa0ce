from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.contracts.process_trees import EXITED, OwnedProcesses, kill, kill_trees, process_state

DEADLINE_S = 60.0
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    return process_state(pid) in EXITED


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_and_its_children_are_gone_also_stopped_ones(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            if stopped:
                os.kill(parent.pid, signal.SIGSTOP)
                os.kill(child, signal.SIGSTOP)
            kill_trees([parent.pid, 2**22])  # the second number is above the kernel's limit of pids
            assert is_gone(parent.pid) and is_gone(child)
        finally:
            kill(child)
            kill(parent.pid)


def test_process_states() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert process_state(process.pid) == "stopped"
        process.kill()
    assert process_state(process.pid) == "exited"
    assert not Path(f"/proc/{process.pid}").exists()


def test_what_an_owner_leaves_is_ended_also_when_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            owned = OwnedProcesses()
            owned.record("engine-0", owner.pid, [child])
            os.kill(child, signal.SIGSTOP)
            wait_for(lambda: process_state(child) == "stopped")
            owned.record("engine-0", owner.pid, [child])
            owned.end_adopted_processes()
            assert process_state(child) == "stopped", "its owner runs"
            owner.kill()
            owner.wait()
            owned.end_adopted_processes()
            wait_for(lambda: is_gone(child))
        finally:
            kill(child)
            owner.kill()


def test_processes_of_a_replaced_owner_are_killed_and_those_of_its_successor_stay() -> None:
    """The check misses the end of the first owner, because the successor starts before the next check."""
    with (
        subprocess.Popen(["sleep", "600"]) as first,
        subprocess.Popen(["sleep", "600"]) as left,
        subprocess.Popen(["sleep", "600"]) as new,
    ):
        try:
            owned = OwnedProcesses()
            owned.record("engine-0", first.pid, [left.pid])
            owned.record("engine-0", os.getpid(), [new.pid])
            owned.end_adopted_processes()
            wait_for(lambda: is_gone(left.pid))
            assert not is_gone(new.pid)
        finally:
            for process in (first, left, new):
                process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline

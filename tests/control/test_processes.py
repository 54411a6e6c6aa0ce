from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.control.processes import GONE, kill, kill_trees, process_state

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    return process_state(pid).startswith(GONE)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_and_its_children_are_gone_also_stopped_ones(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            if stopped:
                os.kill(parent.pid, signal.SIGSTOP)
                os.kill(child, signal.SIGSTOP)
            kill_trees([parent.pid, 2**22])  # no kernel gives the other one to anybody
            assert is_gone(parent.pid) and is_gone(child)
        finally:
            kill(child)
            kill(parent.pid)


def test_a_state_in_words() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert process_state(process.pid) == "T (stopped)"
        process.kill()
    assert process_state(process.pid) == "gone"
    assert not Path(f"/proc/{process.pid}").exists()

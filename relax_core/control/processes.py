"""Ends processes for good, also stopped ones: by signal, since Ray's own kill takes seconds where nobody listens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

GONE_S = 10.0  # what not even SIGKILL ends by then hangs in the kernel
POLL_S = 0.005
GONE = ("gone", "Z", "X")  # how a `process_state` begins where nothing runs any more


def kill(pid: int) -> None:
    """SIGKILL; a process that has ended already is passed over."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_trees(pids: Iterable[int]) -> None:
    """Kills these processes of this machine and all of their children, and waits until they are gone.

    Raises RuntimeError, naming those that are still there after ``GONE_S`` seconds.
    """
    doomed: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            doomed[pid] = process
            doomed |= {child.pid: child for child in process.children(recursive=True)}
    for process in doomed.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + GONE_S
    while left := [process.pid for process in doomed.values() if not _is_dead(process)]:
        if time.monotonic() < deadline:
            time.sleep(POLL_S)
            continue
        names = ", ".join(f"{pid} ({process_state(pid)})" for pid in left)
        raise RuntimeError(f"processes of the run that SIGKILL does not end within {GONE_S:.0f} s: {names}")


def _is_dead(process: psutil.Process) -> bool:
    """A zombie is dead, too: its parent has not collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def process_state(pid: int) -> str:
    """E.g. "T (stopped)", as /proc tells it; "gone" where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return next(line.split(None, 1)[1].strip() for line in lines if line.startswith("State:"))

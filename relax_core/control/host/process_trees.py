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
LONGEST_GAP_S = 3.0  # between two looks at others; more was this process's own pause, and is held against nobody
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


class OwnedProcesses:
    """Processes of this machine that end with their owners. Such a process hears of its owner's end by itself, unless
    it is stopped or hangs."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[psutil.Process, list[psutil.Process]]] = {}

    def note(self, name: str, owner: int, owned: Iterable[int]) -> None:
        """Owner ``name`` is process ``owner`` now, and owns these processes. What its predecessor owned is ended."""
        known = self._owners.get(name)
        if known is not None and known[0].pid != owner:
            self._end(name)
            known = None
        seen = {process.pid: process for process in known[1]} if known is not None else {}
        with suppress(psutil.NoSuchProcess):  # it has just ended: it is looked at again
            process = known[0] if known is not None else psutil.Process(owner)
            self._owners[name] = process, [seen.get(pid) or psutil.Process(pid) for pid in owned]

    def end_adopted_processes(self) -> None:
        """Kills what is left of owners that are gone."""
        for name in [name for name, (owner, _) in self._owners.items() if _is_dead(owner)]:
            self._end(name)

    def _end(self, name: str) -> None:
        for process in self._owners.pop(name)[1]:
            with suppress(psutil.NoSuchProcess):  # so is a process that got its number since
                for one in (process, *process.children(recursive=True)):
                    one.kill()


def process_state(pid: int) -> str:
    """E.g. "T (stopped)", as /proc tells it; "gone" where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return next(line.split(None, 1)[1].strip() for line in lines if line.startswith("State:"))

"""Kills processes and all their children, including stopped processes.

This module uses signals and psutil, because Ray's kill takes seconds for a process that does not answer. A subreaper is
a process that becomes the parent of its descendants when they lose their parent, so it can find and kill all of them. A
process becomes a subreaper by Linux's prctl(2), which the standard library and psutil do not wrap.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

EXIT_TIMEOUT_S = 10.0  # a process that SIGKILL does not end within this time hangs in the kernel
POLL_S = 0.005
EXITED = ("exited", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # values of `process_state` for a process that has exited
PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def kill(pid: int) -> None:
    """Sends SIGKILL to a process, unless it has exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_trees(pids: Iterable[int]) -> None:
    """Kills these processes of this machine and all their children, and waits until all have exited.

    Raises RuntimeError, which names the remaining processes, after ``EXIT_TIMEOUT_S`` seconds.
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
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while remaining := [process.pid for process in doomed.values() if not _has_exited(process)]:
        if time.monotonic() < deadline:
            time.sleep(POLL_S)
            continue
        names = ", ".join(f"{pid} ({process_state(pid)})" for pid in remaining)
        raise RuntimeError(f"processes of the run that SIGKILL does not end within {EXIT_TIMEOUT_S:.0f} s: {names}")


def _has_exited(process: psutil.Process) -> bool:
    """Returns whether a process has exited or is a zombie (its parent has not waited for it yet)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class OwnedProcesses:
    """Kills processes of this machine when their owner process has exited.

    Such a process normally ends by itself after its owner. It remains if it is stopped or hangs.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[psutil.Process, list[psutil.Process]]] = {}

    def record(self, name: str, owner: int, owned: Iterable[int]) -> None:
        """Records that process ``owner``, called ``name``, owns these processes.

        If another process had that name before, its processes are killed.
        """
        known = self._owners.get(name)
        if known is not None and known[0].pid != owner:
            self._end(name)
            known = None
        seen = {process.pid: process for process in known[1]} if known is not None else {}
        with suppress(psutil.NoSuchProcess):  # the process has just exited; the next poll reports the exit
            process = known[0] if known is not None else psutil.Process(owner)
            self._owners[name] = process, [seen.get(pid) or psutil.Process(pid) for pid in owned]

    def forget(self, name: str) -> None:
        """Kills the processes of the owner with this name, and removes the owner."""
        if name in self._owners:
            self._end(name)

    def end_adopted_processes(self) -> None:
        """Kills each process if its owner has exited."""
        for name in [name for name, (owner, _) in self._owners.items() if _has_exited(owner)]:
            self._end(name)

    def _end(self, name: str) -> None:
        for process in self._owners.pop(name)[1]:
            with suppress(psutil.NoSuchProcess):  # psutil also raises this if another process now has the process id
                for member in (process, *process.children(recursive=True)):
                    member.kill()


def process_state(pid: int) -> str:
    """Returns psutil's name for the state of a process, such as "stopped", or "exited" if there is no such process."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return EXITED[0]


def prctl(option: int, value: int | ctypes.c_char_p) -> None:
    """Sets an option of this process in the Linux kernel (man 2 prctl). Raises OSError if the kernel refuses it."""
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def become_subreaper() -> None:
    """Makes this process the parent of descendants that lose their parent, so `end_children` finds them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(*, spare: int | None = None) -> None:
    """Kills all descendants of this process except the child ``spare``, and waits until they have exited.

    Raises RuntimeError, which names the processes that SIGKILL does not end within `EXIT_TIMEOUT_S` seconds.
    """
    began = time.monotonic()
    while children := [child for child in psutil.Process().children(recursive=True) if child.pid != spare]:
        if time.monotonic() - began > EXIT_TIMEOUT_S:
            names = ", ".join(f"{child.pid} ({child.name()})" for child in children)
            raise RuntimeError(f"processes of the run that SIGKILL does not end within {EXIT_TIMEOUT_S:.0f} s: {names}")
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for child in children:
            with suppress(ChildProcessError):  # an indirect child
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(POLL_S)

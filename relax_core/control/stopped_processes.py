"""Kills processes of the run on this machine that the kernel reports as stopped.

A process that is stopped before its first answer is noticed here alone: its owner waits for it and has no heartbeat of
it yet. This covers every kind of process from its fork on, whether its owner is Ray, a worker or the supervisor. Who
has heartbeats of a process notices a longer silence of it first, and names the cause.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.monitor import Check, Elapsed
from relax_core.contracts.process_trees import kill

LOOK_S = 1.0
GRACE_S = 3.0  # after the heartbeat's time, in which the owner of a process kills it and names the cause
_STOPPED = "T"  # in /proc/PID/stat; a process under a debugger is "t"
# Programs of Relax, Ray and SGLang. Other descendants are programs of the user, such as the commands of an agent, which
# may stop their own children.
_OF_THE_RUN = re.compile(rb"relax_core|^ray::|/ray/|sglang")


@dataclass(frozen=True)
class _Process:
    pid: int
    started: int  # clock ticks after boot, which tell apart two processes with one number
    parent: int
    state: str


def _processes() -> Iterator[_Process]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
            fields = text[text.rindex(")") + 2 :].split()  # the name before it may have spaces and brackets
            yield _Process(pid=int(name), started=int(fields[19]), parent=int(fields[1]), state=fields[0])


def _descendants(root: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    found: list[_Process] = []
    parents = [root]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return found


def _command(pid: int) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").strip()
    return b""


class StoppedProcesses:
    """Kills each descendant of process ``root`` that is stopped for ``frozen_after_s`` seconds and `GRACE_S` more.

    ``report`` is called with a line for each. The time of a pause of this process does not count.
    """

    def __init__(
        self,
        root: int,
        *,
        frozen_after_s: float,
        report: Callable[[str], None],
        elapsed: Elapsed | None = None,
    ) -> None:
        self._root, self._report = root, report
        self._limit_s = frozen_after_s + GRACE_S
        self._elapsed = elapsed or Elapsed()
        self._stopped_s: dict[tuple[int, int], float] = {}  # by number and start

    def check(self) -> Check:
        """Returns the check."""
        return Check(name="stopped processes", every_s=LOOK_S, look=self._look)

    def _look(self) -> None:
        passed_s = self._elapsed.since_last()
        earlier = self._stopped_s
        self._stopped_s = {}
        for process in _descendants(self._root):
            if process.state != _STOPPED:
                continue
            key = process.pid, process.started
            stopped_s = earlier[key] + passed_s if key in earlier else 0.0
            self._stopped_s[key] = stopped_s
            if stopped_s > self._limit_s and _OF_THE_RUN.search(command := _command(process.pid)):
                kill(process.pid)
                name = command[:80].decode(errors="replace")
                self._report(f"process {process.pid} ({name}) was stopped for {stopped_s:.0f} s and is killed")

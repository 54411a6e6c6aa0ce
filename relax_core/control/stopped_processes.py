"""Kills processes of the run on this machine that the kernel reports as stopped (SIGSTOP).

Only this check detects a process that is stopped before its first heartbeat, because the owner of such a process still
waits for the start. The check covers all processes of Ray, the workers and the supervisor from their fork on. An owner
that already gets heartbeats detects a silent process earlier, and reports the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import psutil

from relax_core.contracts.monitor import Check, Elapsed

LOOK_S = 1.0
GRACE_S = 3.0  # seconds after the heartbeat timeout, so the owner of a process can kill it first and report the cause
# Programs of Relax, Ray and SGLang. All other descendants are programs of the user, such as agents' commands; they may
# stop their children on purpose.
_OF_THE_RUN = re.compile(r"relax_core|^ray::|/ray/|sglang")


class StoppedProcesses:
    """Kills each descendant of process ``root`` that is stopped for longer than ``frozen_after_s`` + `GRACE_S` seconds.

    ``report`` is called with a line of text for each killed process. Pauses of this process do not count.
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
        self._stopped_s: dict[psutil.Process, float] = {}

    def check(self) -> Check:
        """Returns the check for a `Monitor`."""
        return Check(name="stopped processes", every_s=LOOK_S, look=self._look)

    def _look(self) -> None:
        passed_s = self._elapsed.since_last()
        earlier = self._stopped_s
        self._stopped_s = {}
        for process in psutil.Process(self._root).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_STOPPED:
                    continue
                stopped_s = earlier[process] + passed_s if process in earlier else 0.0
                self._stopped_s[process] = stopped_s
                command = " ".join(process.cmdline())
                if stopped_s > self._limit_s and (match := _OF_THE_RUN.search(command)):
                    process.kill()
                    # The reported name begins at the match, because the path of the interpreter may be long.
                    name = command[match.start() :][:80]
                    self._report(f"process {process.pid} ({name}) was stopped for {stopped_s:.0f} s and is killed")

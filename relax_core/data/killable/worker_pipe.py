"""The child's side of a `KillableProcess`: it reads requests from stdin and writes its answers.

The child always ends with its owner, and so do the processes of its group: a thread waits for the end of stdin. If
library code never releases the interpreter, the kernel's CPU timer ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from relax_core.contracts.stop_signals import ignore_stop_signals
from relax_core.data.killable.worker_frames import HEADER_BYTES, payload_bytes, to_frame

_CPU_GRACE_S = 1.0  # the owner kills a slow worker first; the timer is for a worker without an owner


class WorkerPipe:
    """Is the connection of this process to its owner; a process makes one, before it imports foreign code."""

    def __init__(self) -> None:
        ignore_stop_signals()
        self._requests = sys.stdin.buffer
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # the output of a library must not mix with the answers
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the log is read while the run goes on
        threading.Thread(target=_exit_with_owner, daemon=True).start()

    def read(self) -> bytes:
        """Returns the content of the next message; ends the process if there is none."""
        return self.read_bytes(payload_bytes(self.read_bytes(HEADER_BYTES)))

    def read_bytes(self, count: int) -> bytes:
        """Returns the next ``count`` bytes; ends the process if there are fewer."""
        received = self._requests.read(count)
        if len(received) < count:
            _end_with_group()
        return received

    def write(self, message: Any) -> None:
        """Sends a message to the owner."""
        rest = memoryview(to_frame(message))
        while rest:
            rest = rest[self._answers.write(rest) :]

    def leave(self) -> None:
        """Takes the connection away from this process, a child of the worker that reads and answers no request."""
        self._answers.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Ends the process if the block takes more than ``limit_s`` seconds of CPU time, and a second of grace."""
    signal.setitimer(signal.ITIMER_PROF, limit_s + _CPU_GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _exit_with_owner() -> None:
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # an empty event mask reports only the hang-up
    poll.poll()
    _end_with_group()


def _end_with_group() -> NoReturn:
    """Ends the process and the children in its group; the main thread and the waiting one may both come here."""
    if os.getpgrp() == os.getpid():  # a `KillableProcess` leads a group, in which its own children are
        os.killpg(0, signal.SIGKILL)
    os._exit(0)

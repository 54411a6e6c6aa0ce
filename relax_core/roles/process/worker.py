"""The life of a role's worker: one loop in one thread, a state that others may read, a first failure that is kept.

The loop starts when the process does. So a process that Ray restarts after a kill goes on by itself, from what the bus
and the published weights say; nobody has to tell it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_core.contracts.bus import BusClosed
from relax_core.roles.process.failure import Lost, failure_line, what_was_lost
from relax_core.roles.process.output_log import keep_output
from relax_core.roles.process.role_context import RunContext

State = Literal["starting", "running", "waiting", "done", "failed"]
log = logging.getLogger(__name__)


RUN_PLUGINS = ("rollout", "advantages", "actor", "critic")  # roles whose process runs what users write
STACK_FRAMES = 12  # of each thread, the innermost ones


@dataclass(frozen=True, kw_only=True)
class Wait:
    """``what`` is waited for. ``on``: who owes it, a worker's name or "bus". ``since``: Unix time."""

    what: str
    on: str
    since: float


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """``since``: Unix time of the last change of state. ``detail``: of a failed worker, the cause in one line.
    ``error``: its traceback. ``lost``: what it failed of, where that was no fault of its own. ``host``: where ``pid``
    means this process. ``child_pids``: processes that it owns. ``waits``: what it waits for, the oldest first.
    ``progress``: grows while a long work of its own goes on that the run waits for."""

    name: str
    state: State
    since: float
    pid: int
    detail: str
    error: str | None
    restarts: int = 0  # of a process that the worker itself owns
    last_restart: str = ""  # how that process had ended
    lost: Lost | None = None
    host: str = ""
    child_pids: tuple[int, ...] = ()
    waits: tuple[Wait, ...] = ()
    progress: int = 0


@functools.cache
def process_host() -> str:
    """Names the set of processes in which a pid means the same one: a boot of a kernel, and a pid namespace of it."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def python_stacks() -> dict[str, str]:
    """Of this process: thread name → the innermost frames of its stack; the thread that asks is left out."""
    frames = sys._current_frames()
    return {
        thread.name: "".join(traceback.format_stack(frames[thread.ident])[-STACK_FRAMES:])
        for thread in threading.enumerate()
        if thread.ident in frames and thread.ident != threading.get_ident()
    }


class Worker(ABC):
    """A role's worker. Subclasses set up and work in `work`, which returns when its part of the run is done."""

    def __init__(self, name: str, context: RunContext) -> None:
        self.name = name
        self.context = context
        self._state: State = "starting"
        self._detail = ""
        self._since = time.time()
        self._error: str | None = None
        self._lost: Lost | None = None
        self._waits: dict[object, Wait] = {}
        self._progress = 0
        self.restarts = 0
        self.last_restart = ""
        self.child_pids: tuple[int, ...] = ()
        self._stopping = threading.Event()
        if name.rpartition("-")[0] in RUN_PLUGINS:
            keep_output(context.log_dir / f"{name}.log")
        self._thread = threading.Thread(target=self._main, name=f"{name}-loop", daemon=True)
        self._thread.start()

    @abstractmethod
    def work(self) -> None:
        """Runs the role until the bus closes or `stopping` is set."""

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def set_state(self, state: State, detail: str = "") -> None:
        if state != self._state:
            self._since = time.time()
        self._state, self._detail = state, detail

    def moved_on(self, doing: str) -> None:
        """Tells that a long work of this worker's own goes on. The run waits for it, and does not stand still."""
        self.set_state("running", doing)
        self._progress += 1

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            name=self.name,
            state=self._state,
            since=self._since,
            pid=os.getpid(),
            detail=self._detail,
            error=self._error,
            restarts=self.restarts,
            last_restart=self.last_restart,
            lost=self._lost,
            host=process_host(),
            child_pids=self.child_pids,
            waits=tuple(sorted(self._waits.copy().values(), key=lambda wait: wait.since)),
            progress=self._progress,
        )

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Iterator[None]:
        """Tells others what this worker waits for and on whom, for as long as the block runs; from any thread."""
        place = object()
        self._waits[place] = Wait(what=what, on=on, since=time.time())
        try:
            yield
        finally:
            del self._waits[place]

    def stacks(self) -> dict[str, str]:
        return python_stacks()

    def request_stop(self) -> None:
        """Asks the loop to end at its next safe place; returns at once."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the loop's end; False when it is still running."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self.work()
            self.set_state("done")
        except BusClosed as closed:
            self.set_state("done", str(closed))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Keeps the first failure for the controller, which ends the run with it. From any thread."""
        if self._error is None:
            self._error = "".join(traceback.format_exception(error))
            log.error("%s failed\n%s", self.name, self._error)
            self._lost = what_was_lost(error)
            self.set_state("failed", failure_line(error))

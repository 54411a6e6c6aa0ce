"""The life of a role's worker: one loop in one thread, a state that others may read, a first failure that is kept.

The loop starts when the process does. So a process that Ray restarts after a kill goes on by itself, from what the bus
and the published weights say; nobody has to tell it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from relax_core.contracts.bus import BusClosed
from relax_core.roles.context import RunContext
from relax_core.roles.failure import failure_line

State = Literal["starting", "running", "waiting", "done", "failed"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """``since``: Unix time of the last change of state. ``detail``: of a failed worker, the cause in one line.
    ``error``: its traceback."""

    name: str
    state: State
    since: float
    pid: int
    detail: str
    error: str | None
    restarts: int = 0  # of a process that the worker itself owns


class Worker(ABC):
    """A role's worker. Subclasses set up and work in `work`, which returns when its part of the run is done."""

    def __init__(self, name: str, context: RunContext) -> None:
        self.name = name
        self.context = context
        self._state: State = "starting"
        self._detail = ""
        self._since = time.time()
        self._error: str | None = None
        self.restarts = 0
        self._stopping = threading.Event()
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

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            name=self.name,
            state=self._state,
            since=self._since,
            pid=os.getpid(),
            detail=self._detail,
            error=self._error,
            restarts=self.restarts,
        )

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
        except Exception as error:  # the first failure is kept for the controller, which ends the run with it
            self._error = "".join(traceback.format_exception(error))
            log.error("%s failed\n%s", self.name, self._error)
            self.set_state("failed", failure_line(error))

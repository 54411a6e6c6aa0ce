"""The monitor runs a table of periodic health checks. Every process that supervises other processes has a monitor.

A row of the table has a check's function, its interval, and the action for a finding. A finding names the failed part.
The supervisor's table is in `relax_core/control/supervisor.py`, the controller's table in
`relax_core/control/controller.py`, and the table for Ray's daemons in `relax_core/control/host/ray_session.py`. An
engine owner has a table for its engine, and an engine pool has a table for its engines
(`relax_core/engines/engine_pool.py`). A check may block if it calls a process that does not answer. Such a check runs
in a separate thread, or starts a task in the event loop of a pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

LONGEST_GAP_S = 3.0  # seconds between two checks; any longer time was a pause of this process
# While a block runs, records the text of a worker's wait and the task that has to act (``on``).
Waiting = Callable[..., AbstractContextManager[None]]
JOIN_S = 3.0  # longest wait for the threads at the end; a thread's last check may use its full time limit


def not_recorded(what: str, *, on: str) -> AbstractContextManager[None]:
    """Implements `Waiting` without recording anything."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Describes a failure.

    ``failed_part`` is the name of the failed part, and ``how`` a clause that follows the name.
    """

    failed_part: str
    how: str

    def __post_init__(self) -> None:
        assert self.failed_part and self.how, "an empty cause is a mistake of Relax"

    def __str__(self) -> str:
        return f"{self.failed_part} {self.how}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Holds one row of a table.

    The monitor calls ``look`` every ``every_s`` seconds. ``look`` returns None or a finding; an exception ends the
    monitor's loop. ``act`` is called with the finding. A check without findings needs no ``act``. A check with
    ``in_thread`` runs in a separate thread and stops after its first finding; ``at_end`` is called when the thread
    ends, in the thread.
    """

    name: str
    every_s: float
    look: Callable[[], Finding | None]
    act: Callable[[Finding], None] | None = None
    in_thread: bool = False
    at_end: Callable[[], None] | None = None

    def found(self, finding: Finding) -> None:
        """Runs the action for a finding."""
        assert self.act is not None, f"{self.name} has no action for the finding: {finding}"
        self.act(finding)


class Monitor:
    """Runs the checks of a table. It is a context manager; `tick` makes one pass over the table, in order."""

    def __init__(self, checks: Sequence[Check], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = {check: 0.0 for check in checks if not check.in_thread}
        self._ended = threading.Event()
        self._broken: BaseException | None = None  # the exception that a check in a separate thread raised
        self._threads = [
            threading.Thread(target=self._run_in_thread, args=(check,), name=f"monitor-{check.name}", daemon=True)
            for check in checks
            if check.in_thread
        ]

    def start(self) -> Self:
        """Starts the checks with separate threads; `end` ends them."""
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Ends the checks with separate threads, without waiting for a check in progress."""
        self._ended.set()

    def tick(self, *, at_once: Collection[str] = (), only: Collection[str] | None = None) -> None:
        """Runs the checks that are due, and the checks in ``at_once``. With ``only``, other due checks do not run."""
        if self._broken is not None:
            raise self._broken
        now = self._clock()
        for check, due in self._due.items():
            if (now >= due and (only is None or check.name in only)) or check.name in at_once:
                self._due[check] = now + check.every_s
                if (finding := check.look()) is not None:
                    check.found(finding)

    def _run_in_thread(self, check: Check) -> None:
        try:
            while not self._ended.wait(check.every_s):
                finding = check.look()
                if finding is not None and not self._ended.is_set():
                    check.found(finding)
                    return
        except BaseException as error:
            self._broken = error
            raise
        finally:
            if check.at_end is not None:
                check.at_end()


class Elapsed:
    """Measures the time between two checks, without pauses of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def since_last(self) -> float:
        """Returns the seconds since the last call, at most `LONGEST_GAP_S`; 0 at the first call."""
        last, self._last = self._last, self._clock()
        return 0.0 if last is None else min(self._last - last, LONGEST_GAP_S)

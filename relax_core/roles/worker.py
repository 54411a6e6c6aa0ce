"""Base class of the role workers: runs one loop in a thread, and reports status and first failure.

The loop starts with the process. So if Ray restarts a killed process, the process continues by itself from the state of
the bus and the published weights.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from relax_core.contracts.bus import BusClosed
from relax_core.contracts.outage import is_outage
from relax_core.contracts.private_folder import set_compile_cache, set_private_files
from relax_core.observe.process_usage import ProcessUsage, UsageMeter
from relax_core.roles.failure import Lost, failure_line, what_was_lost
from relax_core.roles.process_placement import on_this_node
from relax_core.roles.role_context import RunContext

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

State = Literal["starting", "running", "waiting", "done", "failed"]
log = logging.getLogger(__name__)


RUN_PLUGINS = ("rollout", "advantages", "actor", "critic")  # roles with processes that run user code
STACK_FRAMES = 12  # number of innermost frames of each thread in a report


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Describes a wait for ``what``. ``on`` names the worker that must act, or "bus". ``since`` is a Unix time."""

    what: str
    on: str
    since: float


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Holds an owner's report on its engine: the address, and the version of the weights, -1 without weights.

    ``running`` and ``waiting`` are numbers of samples. ``tokens_per_s`` is the rate of sampled tokens, and
    ``cache_share`` the used share of the cache's tokens. These four fields are None before the first load request, and
    if the engine does not report them. ``decode_times`` has an entry for each batch size: (samples, decode steps since
    the engine's start, seconds of these steps, seconds in which the engine was ready to run but had no core). It is
    empty if the engine does not count decode steps.
    """

    url: str
    version: int
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    cache_share: float | None = None
    decode_times: tuple[tuple[int, int, float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Holds the status of a worker.

    ``since`` is the Unix time of the last change of state. If the worker has failed, ``detail`` is the cause in one
    line, and ``error`` the traceback. ``lost`` names the lost process or connection if another process caused the
    failure. ``host`` names the host and process namespace in which ``pid`` is valid (`process_host`). ``child_pids``
    are the processes that the worker owns; ``restarts`` is the number of their restarts, and ``last_restart`` says how
    the last restarted process ended. ``waits`` are the worker's waits, oldest first. ``progress`` increases while the
    worker does long work that the run waits for. ``engine`` is the report of an engine owner when its engine is up.
    ``usage`` is the resource usage of the worker's process and its children, None before the first measurement.
    """

    name: str
    state: State
    since: float
    pid: int
    detail: str
    error: str | None
    restarts: int = 0
    last_restart: str = ""
    lost: Lost | None = None
    host: str = ""
    child_pids: tuple[int, ...] = ()
    waits: tuple[Wait, ...] = ()
    progress: int = 0
    engine: EngineReport | None = None
    usage: ProcessUsage | None = None


@functools.cache
def process_host() -> str:
    """Returns a name for the processes that share one pid namespace: the kernel's boot id and the pid namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def python_stacks() -> dict[str, str]:
    """Returns the innermost stack frames of each thread of this process, by thread name, without the calling thread."""
    frames = sys._current_frames()
    return {
        thread.name: "".join(traceback.format_stack(frames[thread.ident])[-STACK_FRAMES:])
        for thread in threading.enumerate()
        if thread.ident in frames and thread.ident != threading.get_ident()
    }


class Worker(ABC):
    """Implements the common part of all role workers.

    A subclass implements `work`, which returns when the role has finished.
    """

    def __init__(self, name: str, context: RunContext) -> None:
        set_compile_cache(os.environ)
        self.name = name
        self.context = on_this_node(context)
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
        self._usage = UsageMeter()
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
        """Returns whether the worker was asked to stop."""
        return self._stopping.is_set()

    def set_state(self, state: State, detail: str = "") -> None:
        """Sets the state that `status` returns."""
        if state != self._state:
            self._since = time.time()
        self._state, self._detail = state, detail

    def report_progress(self, doing: str) -> None:
        """Records progress in long work that the run waits for, so the work is not reported as a stall."""
        self.set_state("running", doing)
        self._progress += 1

    def status(self) -> WorkerStatus:
        """Returns the worker's status."""
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
            usage=self._usage.newest(self.child_pids),
        )

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Iterator[None]:
        """Records, while the block runs, that this worker waits for ``what`` from ``on``; callable from any thread."""
        key = object()
        self._waits[key] = Wait(what=what, on=on, since=time.time())
        try:
            yield
        finally:
            del self._waits[key]

    def stacks(self) -> dict[str, str]:
        """Returns the stacks of this process's threads."""
        return python_stacks()

    def request_stop(self) -> None:
        """Asks the loop to end at its next safe point. Returns at once."""
        self._stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the loop's end. Returns False if the loop still runs after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            self.work()
            self.set_state("done")
        except BusClosed as closed:
            self.set_state("done", str(closed))
        except BaseException as error:  # SystemExit would end this thread, and the worker would be stuck
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Stores the first failure. The controller then ends the run with this failure. Callable from any thread."""
        if self._error is None:
            self._error = "".join(traceback.format_exception(error))
            log.error("%s failed\n%s", self.name, self._error)
            self._lost = what_was_lost(error)
            self.set_state("failed", failure_line(error))


# -- Writes the output of each role's process to a separate log file, because plug-ins also print ----------------------


def keep_output(log_file: Path) -> None:
    """Appends stdout and stderr of this process to ``log_file`` from now on, if this is a process of Ray.

    Does nothing in any other process, for example in a test. If the log file cannot be opened, for example on a full
    disk, the output stays where it was.
    """
    import ray  # imported late, because Ray reads the path of its token during the import

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    set_private_files()  # an external Ray cluster has a different umask
    with suppress(OSError):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # Ray has replaced the streams by streams that write to files of Ray's session.
        sys.stdout, sys.stderr = _stream(1), _stream(2)


class _LogFile(io.FileIO):
    """Drops output that the disk refuses in an outage, so a plug-in that prints can continue."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_outage(error):
                raise
            return memoryview(data).nbytes


def _stream(descriptor: int) -> TextIO:
    file = _LogFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace", line_buffering=True)

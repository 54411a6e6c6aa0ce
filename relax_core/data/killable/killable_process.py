"""Runs one worker process that answers requests, and restarts the process if it hangs or dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

from relax_core.contracts.python_child import cause_in_log, import_path, module_command
from relax_core.data.killable.worker_frames import HEADER_BYTES, Ready, payload_bytes, to_frame
from relax_core.sandbox.worker_sandbox import WorkerSandbox

_START_DEADLINE_S = 120.0
_END_DEADLINE_S = 10.0  # the limit for the end of a killed process
_CLOSED_S = 10.0  # the limit for the end of a process that closed its pipe
_READ_BYTES = 1 << 16
_SIGNAL_EXIT = 128  # bubblewrap exits with this and the number of the signal that ended the worker
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class WorkerLost(Exception):
    """The worker process died, or did not answer before the deadline; the text says which.

    ``late`` is true if it did not answer.
    """

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class KillableProcess:
    """Is one worker process; it is replaced if it is lost.

    ``command`` is the module that runs and its arguments, and ``settings`` its first message. ``what`` begins the text
    of errors. The output of the process goes to ``log_file``, a path or a descriptor, or to this process's stderr. With
    ``sandbox`` it runs there; raises `SandboxRefused` if there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Any,
        *,
        what: str,
        log_file: Path | int | None = None,
        sandbox: WorkerSandbox | None = None,
    ) -> None:
        self._command = command
        self._sandbox = sandbox
        self._settings = settings
        self._what = what
        self._log_file = log_file
        self._lock = threading.Lock()  # serialises a restart and `stop`
        self._stopped = False
        self._process = self._start()
        self._ready = False

    @property
    def pid(self) -> int:
        """Returns the number of the process that runs now, or of the sandbox around it."""
        return self._process.pid

    def ask(self, message: Any, *, limit_s: float, content: bytes = b"") -> bytes:
        """Returns the process's answer to a message, which ``content`` follows as it is, within ``limit_s`` seconds.

        Must be called by one thread at a time. Raises `WorkerLost` if the process hangs or dies; a new process is
        started then. Raises RuntimeError if the process cannot start or `stop` was called.
        """
        self._wait_ready()
        try:
            return self._answer(message, content, limit_s=limit_s)
        except WorkerLost:
            self._restart()
            raise

    def stop(self) -> None:
        """Kills the process for good; a call of `ask` in flight raises `WorkerLost`."""
        with self._lock:
            self._stopped = True
            self.kill()

    def replace(self) -> None:
        """Kills the process and starts a new one; nothing happens after `stop`. No call of `ask` may be in flight."""
        self._restart()

    def kill(self) -> None:
        """Kills the process with all of its children; the next call of `ask` notices it.

        If the process has died, those of its children are killed that stayed in its process group.
        """
        pid, children = self._process.pid, []
        if self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(pid).children(recursive=True)  # one may have left the process group
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(pid, signal.SIGKILL)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait(_END_DEADLINE_S)

    def close_pipes(self) -> None:
        """Closes the pipes to the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = module_command(*self._command)
        with ExitStack() as stack:
            log = self._log_file
            if isinstance(log, Path):
                self._log_begins = log.stat().st_size if log.exists() else 0
                log = stack.enter_context(log.open("ab")).fileno()
            if self._sandbox is None:
                path = {"PYTHONPATH": import_path()}
                process = _popen(command, log, environment=os.environ | path | _THREADS)
            else:
                before, descriptor = self._sandbox.command(stack, variables=_THREADS)
                given = {"PATH": os.environ.get("PATH", "")}
                start = _starter().submit(_popen, [*before, *command], log, environment=given, inherited=(descriptor,))
                process = start.result(_START_DEADLINE_S)
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _restart(self) -> None:
        with self._lock:
            self.kill()
            if not self._stopped:
                self.close_pipes()
                self._process = self._start()
                self._ready = False

    def _wait_ready(self) -> None:
        if self._stopped:
            raise RuntimeError(f"{self._what}: the pool was closed")
        if self._ready:
            return
        try:
            error = self._start_error()
        except WorkerLost:  # something may have killed it while it started
            self._restart()
            try:
                error = self._start_error()
            except WorkerLost as lost:
                error = str(lost)
        if error:
            raise RuntimeError(f"{self._what}: its worker process could not start: {error}")
        self._ready = True

    def _start_error(self) -> str:
        """Sends the settings and returns the worker's error; raises `WorkerLost` as `_answer` does."""
        answer = self._answer(self._settings, b"", limit_s=_START_DEADLINE_S)
        return msgspec.msgpack.decode(answer, type=Ready).error

    def _answer(self, message: Any, content: bytes, *, limit_s: float) -> bytes:
        """Returns the process's answer; raises `WorkerLost` if it takes longer than ``limit_s`` seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        to_worker, from_worker = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s

        def wait_for(descriptor: int, event: int) -> None:
            poll = select.poll()
            poll.register(descriptor, event)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise WorkerLost(f"no answer within {limit_s:g} s", late=True)

        def read(count: int) -> bytes:
            received = bytearray()
            while len(received) < count:
                wait_for(from_worker, select.POLLIN)
                part = os.read(from_worker, min(_READ_BYTES, count - len(received)))
                if not part:
                    raise self._died()
                received += part
            return bytes(received)

        for rest in (memoryview(to_frame(message)), memoryview(content)):
            while rest:
                wait_for(to_worker, select.POLLOUT)
                try:
                    rest = rest[os.write(to_worker, rest) :]
                except BrokenPipeError:
                    raise self._died() from None
        return read(payload_bytes(read(HEADER_BYTES)))

    def _died(self) -> WorkerLost:
        try:
            code = self._process.wait(_CLOSED_S)
        except subprocess.TimeoutExpired:
            return WorkerLost("its worker process closed its pipe and keeps running")
        if self._sandbox is not None and code > _SIGNAL_EXIT:
            code = _SIGNAL_EXIT - code
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if not isinstance(self._log_file, Path) or code < 0:
            return WorkerLost(f"its worker process died ({how})")
        why = cause_in_log(self._log_file, after=self._log_begins)
        return WorkerLost(f"its worker process died ({how}){why and f': {why}'}; see {self._log_file}")


@cache
def _starter() -> ThreadPoolExecutor:
    """Returns the thread that starts all sandboxes: the kernel ends a sandbox together with the thread that made it."""
    return ThreadPoolExecutor(1, thread_name_prefix="start of sandboxes")


def _popen(
    command: Sequence[str], log: int | None, *, environment: Mapping[str, str], inherited: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,
        env=environment,
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C reaches only the owner, and a kill reaches the process's own children
    )

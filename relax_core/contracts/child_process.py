"""Starts child processes, exchanges messages with them under deadlines, and ends each child with all its descendants.

A `Child` is one process. A `WorkerProcess` runs a child that answers requests, and replaces a lost child. `OwnerPipe`
is the worker's end of the connection. The owner of a child is the process that started it. Three kinds of processes are
started by other modules: forks that share a process's memory (the controller, the calls of rewards, Ray's workers); the
code sandbox, which imports nothing of Relax; and the shell that removes a host's media files after the exit of the
process that owns them (`bus/media_storage.py`).
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

import msgspec

from relax_core.contracts.stop_signals import ignore_stop_signals

_ROOT = str(Path(__file__).resolve().parents[2])
_LOG_TAIL_BYTES = 1 << 16
_NO_CAUSE = re.compile(r"\s|Traceback \(most recent call last\)|\^+$|During handling of|The above exception was")
_END_S = 10.0  # a process that SIGKILL does not end within this time hangs in the kernel
_CLOSED_S = 10.0  # limit for the exit of a process that closed its pipe
_START_S = 120.0  # limit for the first reply of a worker
_CPU_GRACE_S = 1.0  # the CPU timer adds this to the limit, because a live owner kills the worker at the limit
_HEADER_BYTES = 4  # header of a message: its length in bytes, big-endian
log = logging.getLogger(__name__)
_READ_BYTES = 1 << 16
_SIGNAL_EXIT = 128  # bubblewrap's exit code is this plus the number of the signal that ended the process
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# With this setting OpenMP's threads spin for about 30 µs before they sleep. Without spinning, a norm of 128 rows on two
# threads takes 0.4 ms, not 0.05 ms. With OpenMP's default they spin for milliseconds on cores that other processes
# need.
OPENMP_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
# This script replaces itself with the program. The kernel sends signal ``number`` to the program when the thread that
# started it ends, even by a kill. Python ignores SIGPIPE, and the program must not inherit this setting.
_WITH_PARENT = """import ctypes, os, signal, sys
number, parent, ignored = sys.argv[1:4]
ctypes.CDLL(None).prctl(1, int(number))
if os.getppid() != int(parent): os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for one in map(int, ignored.split()):
    signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [one])
os.execvp(sys.argv[4], sys.argv[4:])"""


class Limit(msgspec.Struct, frozen=True):
    """Holds a time limit and the configuration key that sets it; a constant has no key."""

    seconds: float
    key: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.seconds:g} s" if self.key else f"{self.seconds:g} s"


class Sandbox(Protocol):
    """Declares a sandbox for child processes."""

    def command(self, stack: ExitStack, *, variables: dict[str, str]) -> tuple[list[str], int]:
        """Returns the command's prefix and a descriptor that the process inherits; ``stack`` closes the descriptor.

        ``variables`` are added to the environment of the sandbox.
        """


class ChildLost(Exception):
    """The process exited, or did not answer before the deadline; the text says which of the two.

    ``late`` is True if the process did not answer. ``code`` is its exit code, negative for a signal and None while the
    process runs.
    """

    def __init__(self, text: str, *, late: bool = False, code: int | None = None) -> None:
        super().__init__(text)
        self.late = late
        self.code = code


class Child:
    """Runs one child process in a separate session, so a Ctrl-C in the terminal signals only the owner.

    End of file on the child's stdin means that the owner has ended. ``log``, a path or a descriptor, gets the child's
    stderr, and also its stdout if ``stdout`` is None. Without a log, the output goes to this process's stderr.
    ``environment`` replaces this process's environment; with ``sandbox`` it is added to the sandbox's environment.
    ``blocked`` lists the signals that are blocked in the child. ``with_parent`` is a signal that the child gets when
    the thread that started it ends, even by a kill. A child with ``with_parent`` ignores the signals in ``ignored``.
    ``start`` limits the time until the child's first answer. Raises OSError if the command cannot be executed,
    and errors of the sandbox.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log: Path | int | None = None,
        stdin: int = subprocess.PIPE,
        stdout: int | None = subprocess.PIPE,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        inherited: Sequence[int] = (),
        sandbox: Sandbox | None = None,
        blocked: Collection[signal.Signals] = (),
        with_parent: signal.Signals | None = None,
        ignored: Collection[signal.Signals] = (),
        start: Limit | None = None,
    ) -> None:
        self.name = name
        self.log = log if isinstance(log, Path) else None
        self._log_begins = 0
        self._in_sandbox = sandbox is not None
        self._answered = self._group_ended = False
        self._start = start or Limit(_START_S)
        self._unread = bytearray()
        with ExitStack() as stack:
            if isinstance(log, Path):
                log.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(log.open("ab"))
                log, self._log_begins = file.fileno(), file.tell()
            if sandbox is not None:
                before, descriptor = sandbox.command(stack, variables=dict(environment or {}))
                command, inherited = [*before, *command], [*inherited, descriptor]
                environment = {"PATH": os.environ.get("PATH", "")}
            if with_parent is not None:
                command = ends_with_parent(command, with_parent, ignored=ignored)

            def popen() -> subprocess.Popen[bytes]:
                unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [*blocked, *ignored])
                try:
                    return subprocess.Popen(
                        command,
                        stdin=stdin,
                        stdout=log if stdout is None else stdout,
                        stderr=log,
                        bufsize=0,
                        cwd=folder,
                        env=environment,
                        pass_fds=inherited,
                        start_new_session=True,
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

            self._process = popen() if sandbox is None else _starter().submit(popen).result(self._start.seconds)
        self._start_ends = time.monotonic() + self._start.seconds
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Returns the id of the process, or of the sandbox around it."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """Returns the non-blocking pipe to the process."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Returns the non-blocking pipe from the process."""
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while the process runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._end_group()
        return _SIGNAL_EXIT - code if self._in_sandbox and code > _SIGNAL_EXIT else code

    def wait(self, limit_s: float) -> int | None:
        """Returns the exit code, or None if the process still runs after ``limit_s`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, but not to its children, if the process has not ended."""
        self._process.send_signal(number)

    # -- Messages -----------------------------------------------------------------------------------------------------
    def ask(self, message: Any, *, limit_s: float, content: bytes = b"") -> bytes:
        """Sends a message, followed by the raw bytes ``content``, and returns the answer. Raises `ChildLost`."""
        limit, began = Limit(limit_s), time.monotonic()
        for part in (to_frame(message), content):
            self._write(part, limit, ends=began + limit_s)
        return self._frame(limit, ends=began + limit_s)

    def first_answer(self, message: Any) -> bytes:
        """Sends the first message and returns its answer, within the start's limit. Raises `ChildLost`."""
        self._write(to_frame(message), self._start, ends=self._start_ends)
        return self._frame(self._start, ends=self._start_ends)

    def send(self, message: bytes) -> None:
        """Writes to the process. Ignores a process that has ended; raises `ChildLost` if the process does not read."""
        limit = Limit(_END_S)
        with suppress(BrokenPipeError):
            self._write_bytes(message, limit, ends=time.monotonic() + limit.seconds)

    def next_frame(self, limit: Limit) -> bytes:
        """Returns the next message of the process. Raises `ChildLost`."""
        return self._frame(limit, ends=time.monotonic() + limit.seconds)

    def first_line(self, *, wait_s: float | None = None) -> bytes | None:
        """Returns the next line that the process writes during its start. Raises `ChildLost`, which names the process.

        Returns None if no line arrives within ``wait_s`` seconds and the start's limit has not passed.
        """
        ends = self._start_ends if wait_s is None else min(self._start_ends, time.monotonic() + wait_s)
        try:
            while b"\n" not in self._unread:
                self._read_more(self._start, ends=ends)
        except ChildLost as lost:
            if lost.late and time.monotonic() < self._start_ends:
                return None
            raise ChildLost(f"{self.name} did not start: {lost}", late=lost.late, code=lost.code) from lost
        line, _, rest = self._unread.partition(b"\n")
        self._unread = rest
        self._answered = bool(line)
        return bytes(line)

    def _frame(self, limit: Limit, *, ends: float) -> bytes:
        return self._bytes(int.from_bytes(self._bytes(_HEADER_BYTES, limit, ends), "big"), limit, ends)

    def _bytes(self, count: int, limit: Limit, ends: float) -> bytes:
        while len(self._unread) < count:
            self._read_more(limit, ends=ends)
        found = bytes(memoryview(self._unread)[:count])
        del self._unread[:count]
        self._answered = True
        return found

    def _read_more(self, limit: Limit, *, ends: float) -> None:
        self._await(self.stdout, select.POLLIN, limit, ends)
        part = os.read(self.stdout.fileno(), _READ_BYTES)
        if not part:
            raise self._ended()
        self._unread += part

    def _write(self, content: bytes, limit: Limit, *, ends: float) -> None:
        try:
            self._write_bytes(content, limit, ends=ends)
        except BrokenPipeError:
            raise self._ended() from None

    def _write_bytes(self, content: bytes, limit: Limit, *, ends: float) -> None:
        rest = memoryview(content)
        while rest:
            self._await(self.stdin, select.POLLOUT, limit, ends)
            rest = rest[os.write(self.stdin.fileno(), rest) :]

    def _await(self, pipe: IO[bytes], event: int, limit: Limit, ends: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, ends - time.monotonic()) * 1e3):
            if self._answered:
                raise ChildLost(f"no answer within {limit}", late=True)
            raise ChildLost(self._with_log(f"process {self.pid} gave no answer within {limit}"), late=True)

    def _ended(self) -> ChildLost:
        code = self.wait(_CLOSED_S)
        if code is None:
            return ChildLost("its process closed its pipe and keeps running")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = f"its process died ({how})"
        return ChildLost(text if self._answered and code < 0 else self._with_log(text), code=code)

    def _with_log(self, text: str) -> str:
        if self.log is None:
            return text
        why = cause_in_log(self.log, after=self._log_begins).removesuffix(".")
        return f"{text}{why and f': {why}'}; see {self.log}"

    # -- The end ------------------------------------------------------------------------------------------------------
    def end(self, *, grace_s: float) -> bool:
        """Closes stdin, which tells the process to end, and kills its process tree after ``grace_s`` seconds.

        If ``grace_s`` is 0, kills the process at once. Returns whether the process ended by itself. Call this method
        also for a process that has ended.
        """
        if grace_s:
            self.close_stdin()
        by_itself = self.wait(grace_s) is not None
        self.kill()
        self.close_pipes()
        return by_itself

    def kill(self) -> None:
        """Kills the process and all its children; a call that waits for it in another thread then fails.

        If the process has ended already, kills the remaining children in its process group.
        """
        if self._process.poll() is None:
            from relax_core.contracts.process_trees import kill_trees

            kill_trees([self.pid])
        self._end_group()
        self._process.wait(_END_S)

    def _end_group(self) -> None:
        """Kills the process group, but only once, because later its id may belong to another group."""
        if not self._group_ended:
            self._group_ended = True
            with suppress(ProcessLookupError):  # all processes of the group have ended
                os.killpg(self.pid, signal.SIGKILL)

    def close_stdin(self) -> None:
        """Closes the pipe to the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def close_pipes(self) -> None:
        """Closes the pipes to and from the process."""
        for pipe in self._pipes():
            pipe.close()

    def _pipes(self) -> list[IO[bytes]]:
        return [pipe for pipe in (self._process.stdin, self._process.stdout) if pipe is not None]


@cache
def _starter() -> ThreadPoolExecutor:
    """Returns the thread that starts all sandboxes; the kernel ends a sandbox together with this thread."""
    return ThreadPoolExecutor(1, thread_name_prefix="start of sandboxes")


def end_starter() -> None:
    """Ends the thread that starts sandboxes, and thereby all running sandboxes. A later sandbox starts a new thread."""
    if _starter.cache_info().currsize:
        _starter().shutdown(wait=True)
        _starter.cache_clear()


# -- Workers ----------------------------------------------------------------------------------------------------------
class Ready(msgspec.Struct, frozen=True):
    """Holds a worker's first message; ``error`` says why it cannot work, or is empty."""

    error: str


class WorkerProcess:
    """Runs a child process that answers requests with plug-in or user code, and replaces it if it hangs or dies.

    ``command`` is a module of Relax and its arguments. ``settings`` is the first message; the process answers this
    message with `Ready`. After that the process answers each request with one message. ``name`` is the prefix of
    errors. ``log`` and ``sandbox`` are the parameters of `Child`.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Any,
        *,
        name: str,
        log: Path | int | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._command = command
        self._sandbox = sandbox
        self._settings = settings
        self._name = name
        self._log = log
        self._lock = threading.Lock()  # excludes a restart during `stop`
        self._stopped = False
        self._child = self._start()
        self._ready = False

    @property
    def pid(self) -> int:
        """Returns the id of the current process, or of the sandbox around it."""
        return self._child.pid

    def ask(self, message: Any, *, limit_s: float, content: bytes = b"") -> bytes:
        """Sends a message and the raw bytes ``content``, and returns the answer, within ``limit_s`` seconds.

        Only one thread at a time may call this method. If the process hangs or dies, starts a new process and raises
        `ChildLost`. Raises RuntimeError if the process cannot start or `stop` was called.
        """
        self._wait_ready()
        try:
            return self._child.ask(message, limit_s=limit_s, content=content)
        except ChildLost:
            self.replace()
            raise

    def stop(self) -> None:
        """Kills the process permanently; a call of `ask` in flight raises `ChildLost`."""
        with self._lock:
            self._stopped = True
            self._child.kill()

    def replace(self) -> None:
        """Kills the process and, unless `stop` was called, starts a new process. No call of `ask` may be in flight."""
        with self._lock:
            self._child.kill()
            if not self._stopped:
                self._child.close_pipes()
                self._child = self._start()
                self._ready = False

    def kill(self) -> None:
        """Kills the process and all its children; the next call of `ask` then fails."""
        self._child.kill()

    def close_pipes(self) -> None:
        """Closes the pipes to the process."""
        self._child.close_pipes()

    def _start(self) -> Child:
        environment = _THREADS if self._sandbox else os.environ | {"PYTHONPATH": import_path()} | _THREADS
        command = module_command(*self._command)
        return Child(command, name=self._name, log=self._log, environment=environment, sandbox=self._sandbox)

    def _wait_ready(self) -> None:
        if self._stopped:
            raise RuntimeError(f"{self._name}: the pool was closed")
        if self._ready:
            return
        try:
            error = self._start_error()
        except ChildLost:  # the process may have been killed during its start
            self.replace()
            try:
                error = self._start_error()
            except ChildLost as lost:
                error = str(lost)
        if error:
            raise RuntimeError(f"{self._name}: its worker process could not start: {error}")
        self._ready = True

    def _start_error(self) -> str:
        return msgspec.msgpack.decode(self._child.first_answer(self._settings), type=Ready).error


class LimitedLog:
    """Copies output written to ``descriptor`` into a file, up to ``max_bytes``, and drops all further output.

    So a process with endless output never waits for a reader and never fills the disk. Without a ``path`` all output is
    dropped. Output that cannot be written, for example on a full disk, is dropped, too, and a warning is logged once.
    """

    def __init__(self, path: Path | None, *, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._reader, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._drain, daemon=True, name="output of workers")
        self._thread.start()

    def close(self) -> None:
        """Closes the descriptor; the file is complete when the processes that inherited it have ended."""
        os.close(self.descriptor)

    def _drain(self) -> None:
        failed = False
        while part := os.read(self._reader, _READ_BYTES):
            if self._path is None or not self._left:
                continue
            written = part[: self._left]
            try:
                with self._path.open("ab") as file:
                    file.write(written)
                    if len(written) == self._left:
                        file.write(b"\n[the log has reached its limit; further output is dropped]\n")
            except OSError as error:  # such as a full disk; the processes that write must not wait
                if not failed:
                    log.warning("output of workers is lost, because %s cannot be written: %s", self._path, error)
                failed = True
            else:
                self._left -= len(written)
        os.close(self._reader)


# -- In the child -----------------------------------------------------------------------------------------------------
class OwnerPipe:
    """Connects a worker to its owner. A worker creates one connection, before it imports plug-in or user code.

    The worker and its process group always end with the owner, because a thread waits for the end of stdin. If library
    code never releases the interpreter lock, the kernel's CPU timer ends the worker (`cpu_limit`).
    """

    def __init__(self) -> None:
        ignore_stop_signals()
        self._requests = sys.stdin.buffer
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # output of a library must not appear among the answers
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the log is read during the run
        threading.Thread(target=_exit_with_owner, daemon=True).start()

    def read(self) -> bytes:
        """Returns the content of the next message; ends the process if stdin has ended."""
        return self.read_bytes(int.from_bytes(self.read_bytes(_HEADER_BYTES), "big"))

    def read_bytes(self, count: int) -> bytes:
        """Returns the next ``count`` bytes; ends the process if stdin ends before."""
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
        """Closes the connection in a forked child of the worker: the child does not answer requests."""
        self._answers.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Ends the process if the block takes more than ``limit_s`` seconds of CPU time plus `_CPU_GRACE_S`."""
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
    """Ends the process and the children in its group. Any thread may call this function."""
    if os.getpgrp() == os.getpid():  # a `Child` leads a process group that contains its children
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


# -- Messages, commands and causes ------------------------------------------------------------------------------------
def to_frame(message: Any) -> bytes:
    """Returns 4 bytes of big-endian length and the message as msgpack."""
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


def ends_with_parent(
    command: Sequence[str], number: signal.Signals, *, ignored: Collection[signal.Signals] = ()
) -> list[str]:
    """Returns a command that runs a program and sends it signal ``number`` when the thread that started it ends."""
    words = [str(int(number)), str(os.getpid()), " ".join(str(int(signum)) for signum in ignored)]
    return [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *words, *command]


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command line that runs a module of Relax.

    The working folder is last in the module search path (`relax_core`), so a user's types.py does not replace Python's
    module. It is first only if it is a checkout of Relax and Relax is not installed.
    """
    by_folder = os.getcwd() == _ROOT and not sys.flags.safe_path
    safe = ["-P"] if sys.path.count(_ROOT) > by_folder else []
    return [sys.executable, *safe, "-m", module, *words]


def import_path() -> str:
    """Returns PYTHONPATH for a process with this process's import path; its working folder comes last."""
    entries = sys.path[:-1] if sys.path[-1:] == [os.getcwd()] else sys.path
    return os.pathsep.join([_ROOT, *entries])


def cause_in(output: str | bytes) -> str:
    """Returns the line of a process's output that states why the process failed; empty if there is no output.

    If the output ends with a traceback, this is the traceback's error line; otherwise it is the last line.
    """
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not _NO_CAUSE.match(line)), lines[-1].strip() if lines else "")


def cause_in_log(log: Path, *, after: int = 0) -> str:
    """Returns `cause_in` of a log without its first ``after`` bytes; empty if the log does not exist."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(after, size - _LOG_TAIL_BYTES))
            return cause_in(file.read())
    except OSError:
        return ""

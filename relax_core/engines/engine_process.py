"""Runs an engine as a child process, which its owner starts, polls and stops, and which ends with its owner."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from relax_core.config.schema import EngineConfig
from relax_core.contracts.child import cause_in_log
from relax_core.contracts.engine import EngineError
from relax_core.contracts.engine_kind import EngineStart
from relax_core.engines.http_server.held_port import HeldPort
from relax_core.engines.sglang import scratch as engine_scratch
from relax_core.registry import find_engine

KILLED_S = 10.0  # seconds in which a killed process has ended, unless the kernel holds it


@dataclass(frozen=True, kw_only=True)
class EngineLaunch(EngineStart):
    """Holds what one engine process is started with, and the log that gets its output."""

    engine: EngineConfig
    log_file: Path

    def command(self) -> list[str]:
        """Returns the command line."""
        return find_engine(self.engine.name).command(self)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables."""
        return dict(find_engine(self.engine.name).environment(self))

    def new_scratch(self) -> Path | None:
        """Makes a folder for the files of this one process, or returns None if its kind of engine leaves no files."""
        return engine_scratch.new_scratch() if find_engine(self.engine.name).scratch else None


class _Ready(msgspec.Struct):
    url: str
    pid: int
    port: int


class EngineKilled(EngineError):
    """Says that a signal has ended an engine before it answered; ``code`` is its exit code, which is negative."""

    def __init__(self, words: str, *, code: int) -> None:
        super().__init__(words)
        self.code = code


class EngineProcess:
    """Owns a running engine, which ends when its stdin is closed, so that it ends with this process in every case.

    ``held_port`` is the port of a kind of engine that serves from its owner's socket, else None.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], ready: _Ready, scratch: Path | None, *, held_port: HeldPort | None
    ) -> None:
        self._process = process
        self._scratch = scratch
        self.held_port = held_port
        self.url = ready.url
        self.pid = ready.pid
        self.port = ready.port

    @classmethod
    def start(cls, launch: EngineLaunch, *, held_port: HeldPort | None = None) -> EngineProcess:
        """Starts the engine and waits until it answers, at most ``launch.engine.start_timeout_s`` seconds.

        ``held_port`` is that of an earlier process, whose place this one takes; without it the port is ``launch.port``.
        The log is appended to. Raises EngineError with the cause in the log if the engine does not start, and
        `EngineKilled` if somebody else has killed it.
        """
        launch.log_file.parent.mkdir(parents=True, exist_ok=True)
        scratch = launch.new_scratch()
        with ExitStack() as undo:
            if held_port is None and find_engine(launch.engine.name).takes_listener:
                held_port = _held_port(launch)
                undo.callback(held_port.close)
            if held_port is not None:
                launch = replace(launch, listener=held_port.descriptor)
            undo.callback(_remove, scratch)
            begins = launch.log_file.stat().st_size if launch.log_file.exists() else 0
            process = _spawn(launch, scratch)
            undo.callback(_end_rest, process, scratch)
            assert process.stdout is not None
            deadline = time.monotonic() + launch.engine.start_timeout_s
            while (line := first_line(process.stdout, deadline=deadline)) == b"\n":
                _hand_over(held_port, process)
            if not line.endswith(b"\n"):
                ended = process.poll() is not None or not _kill(process)
                why = (
                    f"ended with {process.returncode}" if ended else f"no answer in {launch.engine.start_timeout_s:g} s"
                )
                last = f"{launch.log_file} ends with: {cause_in_log(launch.log_file, after=begins) or 'nothing'}"
                words = f"{launch.engine.name} engine did not start: {why}; {last}"
                if ended and process.returncode < 0:
                    raise EngineKilled(words, code=process.returncode)
                raise EngineError(words)
            ready = msgspec.json.decode(line, type=_Ready)
            _hand_over(held_port, process)
            undo.pop_all()
        return cls(process, ready, scratch, held_port=held_port)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self._process.poll()

    def stop(self, *, timeout_s: float, keeps_port: bool = False) -> None:
        """Ends the process by closing its stdin, after ``timeout_s`` seconds by SIGKILL, and removes its files.

        Call it also if the process has ended by itself. With ``keeps_port`` the held port stays taken, for another
        process.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILLED_S)
        self._process.stdout.close()
        _end_rest(self._process, self._scratch)
        _remove(self._scratch)
        if self.held_port is not None and not keeps_port:
            self.held_port.close()


def _held_port(launch: EngineLaunch) -> HeldPort:
    host, port = launch.host, launch.port
    try:
        return HeldPort(host, port)
    except OSError as error:
        raise EngineError(
            f"engine.port={port} of {host}: {os.strerror(error.errno or 0)}; end the process that has it, "
            "or choose another port"
        ) from error


def _hand_over(held_port: HeldPort | None, process: subprocess.Popen[bytes]) -> None:
    if held_port is not None:
        held_port.hand_over(process.pid)


def _spawn(launch: EngineLaunch, scratch: Path | None) -> subprocess.Popen[bytes]:
    told = {} if scratch is None else {engine_scratch.VARIABLE: str(scratch)}
    with launch.log_file.open("ab") as log:
        return subprocess.Popen(
            launch.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=launch.environment() | told,
            pass_fds=() if launch.listener is None else (launch.listener,),
            start_new_session=True,  # a Ctrl-C reaches the owner only, which then stops the engine
        )


def _end_rest(process: subprocess.Popen[bytes], scratch: Path | None) -> None:
    """Ends the remaining processes of an engine whose first process has ended."""
    if scratch is not None:
        engine_scratch.end_session(process.pid, timeout_s=KILLED_S)


def _remove(scratch: Path | None) -> None:
    if scratch is not None:
        engine_scratch.remove_scratch(scratch)


def readable(stream: IO[bytes] | int, *, timeout_s: float) -> bool:
    """Waits until a stream or a descriptor can be read or has ended; returns False if that takes longer."""
    with selectors.DefaultSelector() as waiting:  # select.select takes no descriptor above 1,023
        waiting.register(stream, selectors.EVENT_READ)
        return bool(waiting.select(timeout_s))


def first_line(stream: IO[bytes], *, deadline: float) -> bytes:
    """Returns the first line, or the part of it that came before the stream's end or the deadline."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not readable(stream, timeout_s=left):
            return line
        part = os.read(stream.fileno(), 1)
        if not part:
            return line
        line += part
    return line


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kills the process unless it ends by itself within a second; is True if it was killed."""
    try:
        process.wait(1.0)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILLED_S)
        return True

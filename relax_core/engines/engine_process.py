"""Starts, polls and stops an engine as a child process, which ends when its parent ends."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from relax_core.config.schema import EngineConfig
from relax_core.contracts.child_process import Child, ChildLost, Limit
from relax_core.contracts.engine import EngineError
from relax_core.contracts.engine_kind import EngineStart
from relax_core.engines.held_port import HeldPort
from relax_core.engines.sglang import scratch as engine_scratch
from relax_core.registry import find_engine

KILLED_S = 10.0  # maximum seconds until a killed process has ended, unless the kernel blocks it


@dataclass(frozen=True, kw_only=True)
class EngineLaunch(EngineStart):
    """Holds the settings for the start of one engine process, and the log file for its output."""

    engine: EngineConfig
    log_file: Path

    def command(self) -> list[str]:
        """Returns the command line."""
        return find_engine(self.engine.name).command(self)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables."""
        return dict(find_engine(self.engine.name).environment(self))

    def new_scratch(self) -> Path | None:
        """Creates a folder for the engine's temporary files. Returns None if this kind of engine has no such files."""
        return engine_scratch.new_scratch() if find_engine(self.engine.name).scratch else None


class _Ready(msgspec.Struct):
    url: str
    pid: int
    port: int


class EngineStartLost(EngineError):
    """Reports that an engine did not start.

    ``code`` is the engine's exit code, negative for a signal; None if the engine was not ready in time.
    """

    def __init__(self, text: str, *, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class EngineProcess:
    """Owns a running engine. The engine ends when its stdin is closed, so it never outlives this process.

    ``held_port`` is the engine's port if the engine uses a listening socket of this process, else None.
    """

    def __init__(self, child: Child, ready: _Ready, scratch: Path | None, *, held_port: HeldPort | None) -> None:
        self._child = child
        self._scratch = scratch
        self.held_port = held_port
        self.url = ready.url
        self.pid = ready.pid
        self.port = ready.port

    @classmethod
    def start(cls, launch: EngineLaunch, *, held_port: HeldPort | None = None) -> EngineProcess:
        """Starts the engine and waits for its ready line, at most ``launch.engine.start_timeout_s`` seconds.

        ``held_port`` is the port of an earlier engine process that the new process replaces. Without ``held_port``, the
        port is ``launch.port``. The engine's output is appended to the log. Raises `EngineStartLost` if the engine does
        not start; the log shows the cause. Raises EngineError if the port is taken.
        """
        scratch = launch.new_scratch()
        with ExitStack() as undo:
            if held_port is None and find_engine(launch.engine.name).takes_listener:
                held_port = _held_port(launch)
                undo.callback(held_port.close)
            if held_port is not None:
                launch = replace(launch, listener=held_port.descriptor)
            undo.callback(_remove, scratch)
            child = _start(launch, scratch)
            undo.callback(_end, child, scratch, grace_s=0.0)
            try:
                while not (line := child.first_line()):
                    _hand_over(held_port, child)
            except ChildLost as lost:
                raise EngineStartLost(str(lost), code=lost.code) from lost
            ready = msgspec.json.decode(line, type=_Ready)
            _hand_over(held_port, child)
            undo.pop_all()
        return cls(child, ready, scratch, held_port=held_port)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self._child.poll()

    def stop(self, *, timeout_s: float, keeps_port: bool = False) -> None:
        """Closes the process's stdin, sends SIGKILL after ``timeout_s`` seconds, and removes the process's files.

        Also call this if the process has ended by itself. With ``keeps_port`` the held port stays bound for another
        process.
        """
        _end(self._child, self._scratch, grace_s=timeout_s)
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


def _hand_over(held_port: HeldPort | None, child: Child) -> None:
    if held_port is not None:
        held_port.hand_over(child.pid)


def _start(launch: EngineLaunch, scratch: Path | None) -> Child:
    return Child(
        launch.command(),
        name=f"{launch.engine.name} engine",
        log=launch.log_file,
        environment=launch.environment() | ({} if scratch is None else {engine_scratch.VARIABLE: str(scratch)}),
        inherited=() if launch.listener is None else (launch.listener,),
        start=Limit(launch.engine.start_timeout_s, "engine.start_timeout_s"),
    )


def _end(child: Child, scratch: Path | None, *, grace_s: float) -> None:
    """Ends all processes of the engine, including processes of its session outside its process group."""
    child.end(grace_s=grace_s)
    if scratch is not None:
        engine_scratch.end_session(child.pid, timeout_s=KILLED_S)


def _remove(scratch: Path | None) -> None:
    if scratch is not None:
        engine_scratch.remove_scratch(scratch)

"""An engine as a child process: started, watched and stopped by its owner, and gone when its owner is."""

from __future__ import annotations

import os
import select
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

import msgspec

from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import EngineError
from relax_core.engines.embedded import embedded_launch
from relax_core.engines.sglang.server import scratch as sglang_scratch
from relax_core.engines.sglang.server import sglang_launch

LOG_TAIL_BYTES = 4000
KILLED_S = 10.0  # a process that was killed is gone within this, or the kernel holds it


@dataclass(frozen=True, kw_only=True)
class EngineLaunch:
    """What one engine process is started with. ``port`` 0 takes a free one; give a restarted engine its old port.

    ``load_weights``: serve the folder's own weights at once, as version 0; else nothing is served until an update.
    ``beyond_loopback``: ``engine.host`` may be any address of this machine; the bearer token is asked for there too.
    ``return_routed_experts``, ``stop_strings``: be ready to tell them, and to look for them; the embedded engine always
    is.
    """

    model_folder: Path
    engine: EngineConfig
    dtype: str
    token_file: Path
    log_file: Path
    port: int = 0
    load_weights: bool = False
    beyond_loopback: bool = False
    return_routed_experts: bool = False
    stop_strings: bool = False

    def command(self) -> list[str]:
        return self._kind().command(self)

    def environment(self) -> dict[str, str]:
        return self._kind().environment(self)

    def new_scratch(self) -> Path | None:
        """A folder for this one process, where its kind leaves things beside its memory."""
        return sglang_scratch.new_scratch() if self.engine.name == "sglang" else None

    def _kind(self) -> ModuleType:
        return sglang_launch if self.engine.name == "sglang" else embedded_launch


class _Ready(msgspec.Struct):
    url: str
    pid: int
    port: int


class EngineProcess:
    """A running engine. Its stdin is the life line: when this process ends, however, the engine ends too."""

    def __init__(self, process: subprocess.Popen[bytes], ready: _Ready, scratch: Path | None) -> None:
        self._process = process
        self._scratch = scratch
        self.url = ready.url
        self.pid = ready.pid
        self.port = ready.port

    @classmethod
    def start(cls, launch: EngineLaunch) -> EngineProcess:
        """Starts it and waits until it answers, ``launch.engine.start_timeout_s`` seconds at most. Raises EngineError
        with the log's last line where it does not come up. The log is appended to."""
        launch.log_file.parent.mkdir(parents=True, exist_ok=True)
        scratch = launch.new_scratch()
        with ExitStack() as undo:
            undo.callback(_remove, scratch)
            process = _spawn(launch, scratch)
            undo.callback(_end_rest, process, scratch)
            assert process.stdout is not None
            line = _first_line(process.stdout, deadline=time.monotonic() + launch.engine.start_timeout_s)
            if not line.endswith(b"\n"):
                ended = process.poll() is not None or not _kill(process)
                why = (
                    f"ended with {process.returncode}" if ended else f"no answer in {launch.engine.start_timeout_s:g} s"
                )
                last = f"{launch.log_file} ends with: {_last_line(launch.log_file)}"
                raise EngineError(f"{launch.engine.name} engine did not start: {why}; {last}")
            undo.pop_all()
        return cls(process, msgspec.json.decode(line, type=_Ready), scratch)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def stop(self, *, timeout_s: float) -> None:
        """Ends it, by closing its stdin, then by SIGKILL after ``timeout_s`` seconds; also after its own end, to remove
        what it has left."""
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


def _spawn(launch: EngineLaunch, scratch: Path | None) -> subprocess.Popen[bytes]:
    told = {} if scratch is None else {sglang_scratch.VARIABLE: str(scratch)}
    with launch.log_file.open("ab") as log:
        return subprocess.Popen(
            launch.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=launch.environment() | told,
            start_new_session=True,  # a Ctrl-C is its owner's to handle
        )


def _end_rest(process: subprocess.Popen[bytes], scratch: Path | None) -> None:
    """Of an engine of several processes, once the first of them has ended."""
    if scratch is not None:
        sglang_scratch.end_session(process.pid, timeout_s=KILLED_S)


def _remove(scratch: Path | None) -> None:
    if scratch is not None:
        sglang_scratch.remove_scratch(scratch)


def _first_line(stream: IO[bytes], *, deadline: float) -> bytes:
    """The first line, or what came of it before the stream's end or the deadline."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return line
        part = os.read(stream.fileno(), 1)
        if not part:
            return line
        line += part
    return line


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """True where it had to be killed; False where it ended by itself within a second."""
    try:
        process.wait(1.0)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILLED_S)
        return True


def _last_line(path: Path) -> str:
    """Of a Python failure that is its cause."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"

"""Tries the plug-ins of a run on real data rows before anything starts, in a process that is killed if it hangs.

The env makes the messages of a data row, the reward scores the row's own answer, and a user's own algorithm takes one
made-up group from its rewards to a loss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import Any, Literal

import msgspec

from relax_core.contracts.python_child import cause_in, import_path, module_command
from relax_core.data.killable.worker_frames import HEADER_BYTES, payload_bytes, to_frame
from relax_core.engines.engine_process import readable

START_S = 120.0  # the limit for the start of an interpreter and the imports of plug-ins and their libraries
END_S = 10.0
_READ_BYTES = 1 << 16


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the child process is to try.

    ``rows`` holds data rows with their origin (file and line). ``env``, ``reward``, ``algo`` and ``data`` are the name
    of a plug-in and its settings as msgpack; a plug-in with an empty name is not tried. ``call_s`` is the limit of one
    call of an environment, a reward or a data source in seconds; a reward has its ``timeout_s`` if that is longer, and
    an environment with turns its ``step_timeout_s``.
    ``open_s`` is the limit for opening a data source.
    """

    rows: list[tuple[str, dict[str, Any]]]
    env: tuple[str, bytes] = ("", b"")
    reward: tuple[str, bytes] = ("", b"")
    algo: tuple[str, bytes] = ("", b"")
    data: tuple[str, bytes] = ("", b"")
    call_s: float
    open_s: float


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child process starts ``what``, which may take at most ``limit_s`` seconds."""

    what: str
    limit_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child process has tried everything and found ``problems``."""

    problems: list[str]


def try_plugins(request: Request) -> list[str]:
    """Returns the problems of the plug-ins, one sentence each; a hang and a crash are problems too."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            module_command("relax_core.rollout.trial.plugin_trial_main"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a kill then reaches processes that a plug-in started
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin, process.stdout:
                with suppress(BrokenPipeError):  # the process has died, which is reported below
                    process.stdin.write(to_frame(request))
                stage = Stage(what="the plug-ins' worker process: its start", limit_s=START_S)
                while True:
                    message = _next(process.stdout.fileno(), limit_s=stage.limit_s)
                    if isinstance(message, Done):
                        return message.problems
                    if message == "silent":
                        return [f"{stage.what} did not end within {stage.limit_s:g} s"]
                    if message == "ended":
                        return [f"{stage.what}: its process died ({_how(process)}){_why(printed)}"]
                    assert isinstance(message, Stage)
                    stage = message
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


def _next(descriptor: int, *, limit_s: float) -> Stage | Done | Literal["silent", "ended"]:
    deadline = time.monotonic() + limit_s
    received = bytearray()
    wanted = HEADER_BYTES
    while len(received) < wanted:
        if not readable(descriptor, timeout_s=max(0.0, deadline - time.monotonic())):
            return "silent"
        part = os.read(descriptor, min(_READ_BYTES, wanted - len(received)))
        if not part:
            return "ended"
        received += part
        if wanted == HEADER_BYTES and len(received) == HEADER_BYTES:
            wanted += payload_bytes(bytes(received))
    return msgspec.msgpack.decode(received[HEADER_BYTES:], type=Stage | Done)


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _why(printed: Any) -> str:
    printed.seek(0)
    cause = cause_in(printed.read())
    return f": {cause}" if cause else ""

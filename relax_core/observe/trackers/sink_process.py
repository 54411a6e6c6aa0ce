"""Runs a metrics sink in a child process, so that its library's memory, output and crashes are not the service's."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from relax_core.contracts.host.python_child import cause_in_log, module_command
from relax_core.contracts.sink import BaseSink, Record, SinkStart
from relax_core.observe.trackers.sink_calls import SinkCall, answer_in, framed_call

CALL_S = 60.0  # a call that takes longer ends the child; the next batch starts a new one
START_S = 120.0  # the child imports its library first
END_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0  # between two starts of the child after failures, doubled each time


class SinkLost(RuntimeError):
    """The child of a sink has died, did not answer in time, or is not started again yet."""


class ProcessSink(BaseSink):
    """Opens the sink ``plugin`` in a child process with the first batch, and again after it died.

    ``values`` is the sink's configuration as the user gave it. What the child prints is in the run's folder of logs, in
    ``sink-NAME.log``. An error of the sink is raised here as RuntimeError with its words.
    """

    def __init__(self, name: str, plugin: str, values: Mapping[str, Any], start: SinkStart) -> None:
        self._name, self._plugin, self._values, self._start = name, plugin, dict(values), start
        self._log = start.run_dir / "logs" / f"sink-{name}.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._pause_s, self._next_start = FIRST_PAUSE_S, 0.0

    def write(self, batch: Sequence[Record]) -> None:
        """Sends the batch and waits for the answer."""
        self._open()
        self._call(SinkCall.write(batch), timeout_s=CALL_S)

    def flush(self) -> None:
        """Waits until the sink has passed on what it has collected."""
        if self._child is not None:
            self._call(SinkCall(call="flush"), timeout_s=CALL_S)

    def close(self) -> None:
        """Closes the sink and ends the child."""
        if self._child is None:
            return
        try:
            self._call(SinkCall(call="close"), timeout_s=CALL_S)
        finally:
            self._end()

    # -- the child ----------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        if self._child is not None:
            return
        wait_s = self._next_start - time.monotonic()
        if wait_s > 0:
            raise SinkLost(f"its process is started again in {wait_s:.0f} s")
        self._next_start = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.mkdtemp(prefix=f"relax-sink-{self._name}-")  # libraries leave files there
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                module_command("relax_core.observe.trackers.sink_child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": self._temporary},
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
            )
        call = SinkCall(call="open", plugin=self._plugin, values=self._values, run_dir=str(self._start.run_dir))
        self._call(call, timeout_s=START_S)
        self._pause_s = FIRST_PAUSE_S

    def _call(self, call: SinkCall, *, timeout_s: float) -> None:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None, "the child was started"
        try:
            _send(child.stdin, framed_call(call), timeout_s=timeout_s)
            error = answer_in(_receive(child.stdout, timeout_s=timeout_s))
        except (OSError, EOFError, TimeoutError) as failure:
            self._end()
            raise SinkLost(f"its process {_cause(failure, self._log)}") from failure
        if error:
            if call.call == "open":
                self._end()
            raise RuntimeError(error)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        with suppress(OSError):  # it has died with unread bytes
            child.stdin.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(END_S)
        child.stdout.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _send(pipe: IO[bytes], data: bytes, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    view = memoryview(data)
    os.set_blocking(pipe.fileno(), False)
    while view:
        if not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError(f"did not take a batch within {timeout_s:.0f} s")
        view = view[os.write(pipe.fileno(), view) :]


def _receive(pipe: IO[bytes], *, timeout_s: float) -> bytes:
    """Returns one line. Raises EOFError if the child ended, and TimeoutError."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"did not answer within {timeout_s:.0f} s")
        part = os.read(pipe.fileno(), 65536)
        if not part:
            raise EOFError("ended")
        line += part
    return line


def _cause(failure: Exception, log: Path) -> str:
    if isinstance(failure, TimeoutError):
        return str(failure)
    cause = cause_in_log(log)
    return f"ended: {cause}; see {log}" if cause else f"ended ({failure})"

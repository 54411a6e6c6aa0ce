"""Runs one worker process of an isolated reward and restarts the process if it hangs or dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput
from relax_core.rollout.rewards.reward_frames import HEADER_BYTES, Ready, payload_bytes, to_frame

_START_DEADLINE_S = 120.0
_END_DEADLINE_S = 10.0  # the limit for the end of a killed process
_CLOSED_S = 10.0  # the limit for the end of a process that closed its pipe
_READ_BYTES = 1 << 16


class _WorkerLost(Exception):
    """The worker process died, or did not answer before the deadline; the text says which."""


class RewardWorker:
    """Scores in one worker process; a process that is lost is replaced."""

    def __init__(self, config: RewardConfig, log_file: Path | None) -> None:
        self._config = config
        self._log_file = log_file
        self._lock = threading.Lock()  # serialises a restart and `stop`
        self._stopped = False
        self._process = self._start()
        self._ready = False

    def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns one output per input, in order, within ``config.timeout_s`` seconds per input.

        Must be called by one thread at a time. Raises RuntimeError if the process cannot start or `stop` was called.
        """
        self._wait_ready()
        limit_s = self._config.timeout_s * len(inputs)
        try:
            return msgspec.msgpack.decode(self._answer(inputs, limit_s=limit_s), type=list[RewardOutput])
        except _WorkerLost as error:
            self._restart()
            return [RewardOutput(reward=None, reason=f"reward {self._config.name}: {error}")] * len(inputs)

    def stop(self) -> None:
        """Kills the process for good; a call in flight returns without a reward."""
        with self._lock:
            self._stopped = True
            self._kill()

    def close_pipes(self) -> None:
        """Closes the pipes to the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        root = Path(__file__).parents[3]
        with nullcontext() if self._log_file is None else self._log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "relax_core.rollout.rewards.reward_worker_main", self._config.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches only the owner, and a kill reaches the reward's own children
            )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _restart(self) -> None:
        with self._lock:
            self._kill()
            if not self._stopped:
                self.close_pipes()
                self._process = self._start()
                self._ready = False

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END_DEADLINE_S)

    def _wait_ready(self) -> None:
        if self._stopped:
            raise RuntimeError(f"reward {self._config.name}: the pool was closed")
        if self._ready:
            return
        try:
            error = msgspec.msgpack.decode(self._answer(self._config, limit_s=_START_DEADLINE_S), type=Ready).error
        except _WorkerLost as lost:
            error = str(lost)
        if error:
            raise RuntimeError(f"reward {self._config.name}: its worker process could not start: {error}")
        self._ready = True

    def _answer(self, message: Any, *, limit_s: float) -> bytes:
        """Returns the process's answer; raises `_WorkerLost` if it takes longer than ``limit_s`` seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        to_worker, from_worker = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s

        def wait_for(descriptor: int, event: int) -> None:
            poll = select.poll()
            poll.register(descriptor, event)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise _WorkerLost(f"no answer within {limit_s:g} s")

        def read(count: int) -> bytes:
            received = bytearray()
            while len(received) < count:
                wait_for(from_worker, select.POLLIN)
                part = os.read(from_worker, min(_READ_BYTES, count - len(received)))
                if not part:
                    raise self._died()
                received += part
            return bytes(received)

        rest = memoryview(to_frame(message))
        while rest:
            wait_for(to_worker, select.POLLOUT)
            try:
                rest = rest[os.write(to_worker, rest) :]
            except BrokenPipeError:
                raise self._died() from None
        return read(payload_bytes(read(HEADER_BYTES)))

    def _died(self) -> _WorkerLost:
        try:
            code = self._process.wait(_CLOSED_S)
        except subprocess.TimeoutExpired:
            return _WorkerLost("its worker process closed its pipe and keeps running")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _WorkerLost(f"its worker process died ({how})")

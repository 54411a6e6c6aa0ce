"""Scores responses: in this process, or, for an isolated reward, in worker processes that can be killed."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from relax_core.contracts.reward import RewardInput, RewardKnobs, RewardOutput, RewardSpec
from relax_core.registry import plugin_words
from relax_core.rollout.hang_watch import HangWatch, OnHang
from relax_core.rollout.reward_failures import RewardFailures
from relax_core.rollout.reward_wire import HEADER_BYTES, Ready, payload_bytes, to_frame

_START_DEADLINE_S = 120.0
_END_DEADLINE_S = 10.0  # of a process that was killed
_CLOSED_S = 10.0  # how long one that closed its pipe may take to end
_READ_BYTES = 1 << 16


class RewardPool:
    """One reward, ready to score. Every method may be called from any thread.

    An isolated reward runs in ``workers`` child processes. One that takes longer than ``knobs.timeout_s`` seconds is
    killed and started anew; its input gets reward None with the reason. So does the input of one that dies, and that of
    any reward that raises. ``log_file``: takes what the child processes print. ``on_hang``: is given the error, in
    another thread, where a reward that is not isolated takes longer than ``knobs.timeout_s`` an answer: nobody can end
    it.
    """

    def __init__(
        self,
        spec: RewardSpec,
        knobs: RewardKnobs,
        *,
        workers: int,
        log_file: Path | None = None,
        on_hang: OnHang | None = None,
    ) -> None:
        self.isolated = spec.isolated
        self.failures = RewardFailures(knobs)
        self._spec = spec
        self._knobs = knobs
        self._workers = [_Worker(knobs, log_file) for _ in range(workers if spec.isolated else 0)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, len(self._workers)), thread_name_prefix="reward")
        self._watch = None if spec.isolated or on_hang is None else HangWatch(knobs, on_hang)

    def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """One output an input, in order. Raises `RewardsFailed` where too many of the newest answers have no reward,
        and RuntimeError where a worker cannot start or the pool was closed."""
        outputs = []
        if self.isolated:
            for one, output in zip(inputs, self._threads.map(self._score_isolated, inputs), strict=True):
                self.failures.note(one, output)
                outputs.append(output)
            return outputs
        with nullcontext() if self._watch is None else self._watch.scoring(len(inputs)):
            for one in inputs:
                output, error = self._score_one(one)
                self.failures.note(one, output, error)
                outputs.append(output)
        return outputs

    def _score_one(self, given: RewardInput) -> tuple[RewardOutput, Exception | None]:
        try:
            output = self._spec.score(given, self._knobs)
        except Exception as error:  # foreign code: the sample is dropped with its words, up to reward.max_failed
            return RewardOutput(reward=None, reason=plugin_words(error)), error
        assert isinstance(output, RewardOutput), "the registry checks what a score returns"
        return output, None

    def _score_isolated(self, given: RewardInput) -> RewardOutput:
        worker = self._idle.get_nowait()  # there are as many threads as workers
        try:
            return worker.score(given)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all workers; scores under way come back without a reward. May be called twice."""
        for worker in self._workers:
            worker.stop()
        if self._watch is not None:
            self._watch.close()
        self._threads.shutdown()  # a thread that was waiting for a worker has seen it die
        for worker in self._workers:
            worker.close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Gone(Exception):
    """The worker process died, or did not answer before the deadline; the text says which."""


class _Worker:
    """One place for a worker process; a process that is lost is replaced."""

    def __init__(self, knobs: RewardKnobs, log_file: Path | None) -> None:
        self._knobs = knobs
        self._log_file = log_file
        self._lock = threading.Lock()  # between a restart and `stop`
        self._stopped = False
        self._process = self._start()
        self._ready = False

    def score(self, given: RewardInput) -> RewardOutput:
        self._wait_ready()
        deadline = time.monotonic() + self._knobs.timeout_s
        try:
            self._send(given, deadline=deadline)
            return msgspec.msgpack.decode(self._receive(deadline=deadline), type=RewardOutput)
        except _Gone as error:
            self._restart()
            return RewardOutput(reward=None, reason=f"reward {self._knobs.name}: {error}")

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._kill()

    def close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        root = Path(__file__).parents[2]
        with nullcontext() if self._log_file is None else self._log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "relax_core.rollout.reward_worker_main", self._knobs.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the owner's, and a kill reaches what the reward started
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
            raise RuntimeError(f"reward {self._knobs.name}: the pool was closed")
        if self._ready:
            return
        deadline = time.monotonic() + _START_DEADLINE_S
        try:
            self._send(self._knobs, deadline=deadline)
            error = msgspec.msgpack.decode(self._receive(deadline=deadline), type=Ready).error
        except _Gone as gone:
            error = str(gone)
        if error:
            raise RuntimeError(f"reward {self._knobs.name}: its worker process could not start: {error}")
        self._ready = True

    def _send(self, message: Any, *, deadline: float) -> None:
        assert self._process.stdin is not None
        rest = memoryview(to_frame(message))
        while rest:
            self._wait_for(self._process.stdin.fileno(), select.POLLOUT, deadline=deadline)
            try:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
            except BrokenPipeError:
                raise self._died() from None

    def _receive(self, *, deadline: float) -> bytes:
        return self._read(payload_bytes(self._read(HEADER_BYTES, deadline=deadline)), deadline=deadline)

    def _read(self, count: int, *, deadline: float) -> bytes:
        assert self._process.stdout is not None
        received = bytearray()
        while len(received) < count:
            self._wait_for(self._process.stdout.fileno(), select.POLLIN, deadline=deadline)
            part = os.read(self._process.stdout.fileno(), min(_READ_BYTES, count - len(received)))
            if not part:
                raise self._died()
            received += part
        return bytes(received)

    def _wait_for(self, descriptor: int, event: int, *, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise _Gone(f"no answer within {self._knobs.timeout_s if self._ready else _START_DEADLINE_S:g} s")

    def _died(self) -> _Gone:
        try:
            code = self._process.wait(_CLOSED_S)
        except subprocess.TimeoutExpired:
            return _Gone("its worker process closed its pipe and goes on")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _Gone(f"its worker process died ({how})")

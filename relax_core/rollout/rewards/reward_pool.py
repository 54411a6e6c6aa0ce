"""A run's reward, ready to score: in the event loop, in threads, awaited, or in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.rollout.rewards.hang_watch import HangWatch, OnHang
from relax_core.rollout.rewards.reward_calls import Outcome, score_async, score_here
from relax_core.rollout.rewards.reward_failures import RewardFailures
from relax_core.rollout.rewards.reward_worker import RewardWorker

IN_LOOP_S = 1e-3  # a group is scored in the event loop where that takes no longer, which a thread's start would add to
ALONE_S = 1e-3  # an answer whose scoring takes longer has a thread of its own
_PACE_KEPT = 0.9  # of the longest time lately, a call later: a slow call is forgotten after some tens of quick ones


class RewardPool:
    """One reward, ready to score groups, many at the same time. It belongs to one event loop.

    An isolated reward runs in ``workers`` child processes. A call that takes longer than ``config.timeout_s`` seconds
    an answer is killed with its process, which is started anew; its answers get reward None with the reason. So do
    those of a process that dies, those of an async reward that takes longer, and those of any reward that raises.

    A reward that is not isolated has at most ``concurrency`` calls under way. A plain function runs in threads; the
    groups of one that takes microseconds are scored in the event loop itself, as a thread costs more than they do.

    ``log_file``: takes what the child processes print. ``on_hang``: is given the error, in another thread, where a
    reward that is not isolated takes longer than ``config.timeout_s`` an answer and nobody can end it.
    """

    def __init__(
        self,
        spec: RewardSpec,
        config: RewardConfig,
        *,
        workers: int,
        concurrency: int = 1,
        log_file: Path | None = None,
        on_hang: OnHang | None = None,
    ) -> None:
        self.failures = RewardFailures(config)
        self._spec = spec
        self._config = config
        self._workers = [RewardWorker(config, log_file) for _ in range(workers if spec.isolated else 0)]
        self._idle: queue.SimpleQueue[RewardWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers) or concurrency, thread_name_prefix="reward")
        self._calls = asyncio.Semaphore(concurrency)  # of an async reward
        self._watch = None if spec.isolated or on_hang is None else HangWatch(config, on_hang, shared=not spec.is_async)
        self._answer_s = float("inf")  # the longest that an answer took lately; unknown before the first group

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """The outputs of the answers to one data row, in order. Raises `RewardsFailed` where too many of the newest
        answers have no reward, and RuntimeError where a worker cannot start or the pool was closed."""
        outcomes = [outcome for call in await self._outcomes(inputs) for outcome in call]
        for given, (output, error) in zip(inputs, outcomes, strict=True):
            self.failures.note(given, output, error)
        return [output for output, _ in outcomes]

    async def _outcomes(self, inputs: Sequence[RewardInput]) -> list[list[Outcome]]:
        """Of every call that these answers take, in order."""
        each = [inputs] if self._spec.score_group is not None else [[given] for given in inputs]
        if self._spec.is_async:
            return await asyncio.gather(*map(self._awaited, each))
        loop = asyncio.get_running_loop()
        if self._spec.isolated:
            return await asyncio.gather(*(loop.run_in_executor(self._threads, self._in_worker, call) for call in each))
        if self._answer_s * len(inputs) <= IN_LOOP_S:
            return [self._in_process(inputs)]
        calls = each if self._answer_s > ALONE_S else [inputs]
        return await asyncio.gather(*(loop.run_in_executor(self._threads, self._in_process, call) for call in calls))

    async def _awaited(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        async with self._calls:
            with self._hang_watch(2 * len(inputs)):  # one that keeps the event loop to itself is not cancelled
                return await score_async(self._spec, inputs, self._config)

    def _in_worker(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        worker = self._idle.get_nowait()  # there are as many threads as workers
        try:
            return [(output, None) for output in worker.score(inputs)]
        finally:
            self._idle.put(worker)

    def _in_process(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        began = time.perf_counter()
        with self._hang_watch(len(inputs)):
            outcomes = score_here(self._spec, inputs, self._config)
        answer_s = (time.perf_counter() - began) / len(inputs)
        lately_s = self._answer_s if self._answer_s < float("inf") else 0.0
        self._answer_s = max(answer_s, _PACE_KEPT * lately_s)
        return outcomes

    def _hang_watch(self, answers: int) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.scoring(answers)

    def close(self) -> None:
        """Ends all workers; calls under way in them come back without a reward, and nobody waits for those in threads.
        May be called twice."""
        for worker in self._workers:
            worker.stop()
        if self._watch is not None:
            self._watch.close()
        # A thread that was waiting for a worker has seen it die.
        self._threads.shutdown(wait=bool(self._workers), cancel_futures=True)
        for worker in self._workers:
            worker.close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

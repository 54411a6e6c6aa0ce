"""Scores groups with the run's reward: in the event loop, in threads, awaited, or in killable worker processes."""

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

IN_LOOP_S = 1e-3  # a group that takes no longer is scored in the event loop, because a thread would add as much
ALONE_S = 1e-3  # an answer that takes longer is scored in its own thread
_PACE_KEPT = 0.9  # the factor per call by which a slow answer's time decays, so that it counts for some tens of calls


class RewardPool:
    """Scores groups with one reward, many at the same time; a pool belongs to one event loop.

    An isolated reward runs in ``workers`` child processes. A call that takes longer than ``config.timeout_s`` seconds
    per answer is killed with its process, which is restarted, and its answers have no reward. Answers also have no
    reward if their process dies, if an async reward takes too long, or if the reward raises.

    A reward that is not isolated has at most ``concurrency`` calls in flight. A plain function runs in threads, or in
    the event loop if it takes microseconds, because a thread would cost more than the call.

    ``log_file`` receives the output of the child processes. ``on_hang`` is called with an error, in another thread, if
    a reward that is not isolated takes longer than ``config.timeout_s`` per answer, because such a call cannot be
    ended.
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
        self._calls = asyncio.Semaphore(concurrency)  # limits the calls of an async reward
        self._watch = None if spec.isolated or on_hang is None else HangWatch(config, on_hang, shared=not spec.is_async)
        self._answer_s = float("inf")  # the longest recent time of an answer; unknown before the first group

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of the answers to one data row, in order.

        Raises `RewardsFailed` if too many of the newest answers have no reward, and RuntimeError if a worker cannot
        start or the pool was closed.
        """
        outcomes = [outcome for call in await self._outcomes(inputs) for outcome in call]
        for given, (output, error) in zip(inputs, outcomes, strict=True):
            self.failures.record(given, output, error)
        return [output for output, _ in outcomes]

    async def _outcomes(self, inputs: Sequence[RewardInput]) -> list[list[Outcome]]:
        """Returns the outcomes of each call that scores these answers, in order."""
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
            with self._hang_watch(2 * len(inputs)):  # a call that blocks the event loop cannot be cancelled
                return await score_async(self._spec, inputs, self._config)

    def _in_worker(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        worker = self._idle.get_nowait()  # never empty, because there are as many threads as workers
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
        """Ends all workers; may be called twice.

        Calls in flight in worker processes return without a reward. Calls in threads are not waited for.
        """
        for worker in self._workers:
            worker.process.stop()
        if self._watch is not None:
            self._watch.close()
        # A thread that waits for a worker has noticed the worker's end, and a call that waits for one finds it stopped.
        self._threads.shutdown(wait=bool(self._workers), cancel_futures=not self._workers)
        for worker in self._workers:
            worker.process.close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

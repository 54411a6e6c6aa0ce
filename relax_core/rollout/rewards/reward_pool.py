"""Scores groups with the run's rewards: in the event loop, in threads, awaited, or in worker processes."""

from __future__ import annotations

import asyncio
import queue
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from relax_core.config.reward_choice import ChosenReward, Outcome, RewardChoice
from relax_core.contracts.child_process import LimitedLog
from relax_core.contracts.data import DataRow
from relax_core.contracts.plugin_results import contain_exits
from relax_core.contracts.reward import MASK, RewardConfig, RewardInput, RewardOutput, RewardSpec, with_shadow
from relax_core.rollout.rewards.hang_watch import HangWatch, OnHang
from relax_core.rollout.rewards.reward_calls import score_async, score_sync
from relax_core.rollout.rewards.reward_failures import RewardFailures
from relax_core.rollout.rewards.reward_metrics import RewardMetrics, WorkerTimes
from relax_core.rollout.rewards.reward_sandbox import reward_sandbox
from relax_core.rollout.rewards.reward_worker import RewardWorker

REWARD_CALLS = 64  # concurrent calls of a reward that is not isolated, in each rollout worker
IN_LOOP_S = 1e-3  # a group that takes no longer is scored in the event loop, because a thread would add as much
ALONE_S = 1e-3  # an answer that takes longer is scored in its own thread
_LOG_BYTES = 64 * 2**20  # of the output of workers, which a reward or an answer may flood
_LATE = 1.8  # time limits; an awaited call is cancelled after one limit, so a longer call blocks the event loop
_PACE_KEPT = 0.9  # decay per call of a slow answer's time, which counts for some tens of calls


class _RunningReward:
    """Holds a reward of a pool with its metrics, its hang watch and its recent times."""

    def __init__(self, chosen: ChosenReward, on_hang: OnHang | None) -> None:
        self.chosen, self.spec, self.config = chosen, chosen.spec, chosen.config
        watched = on_hang is not None and not chosen.spec.isolated
        self.watch = HangWatch(chosen.config, on_hang, shared=not chosen.spec.is_async) if watched and on_hang else None
        self.answer_s = float("inf")  # the longest recent time of an answer; unknown before the first group
        self.figures = RewardMetrics()

    def hang_watch(self, answers: float) -> AbstractContextManager[Callable[[], None]]:
        """Returns a context in which ``answers`` answers are scored, as `HangWatch.scoring` does."""
        return nullcontext(lambda: None) if self.watch is None else self.watch.scoring(answers)

    @contextmanager
    def timed(self, inputs: Sequence[RewardInput]) -> Iterator[list[Outcome]]:
        """Counts the outcomes that the block adds to the list, with its time; answers of evaluations do not count."""
        outcomes: list[Outcome] = []
        began = time.perf_counter()
        yield outcomes
        if inputs[0].is_trained:
            self.figures.record([output for output, _ in outcomes], seconds=time.perf_counter() - began)


class RewardPool:
    """Scores groups with a run's rewards, many at the same time; a pool belongs to one event loop.

    The reward of a data row is the run's reward, the reward that the row names (``config.by``), or the combination
    of ``config.parts``.

    The shadow, if there is one, scores the answers of ``config.shadow_share`` of the groups, and all answers of
    evaluations; its verdicts are two more parts of the rewards. With ``config.on_hack`` mask it scores all groups,
    and answers that only the main reward finds right get no reward.

    Isolated rewards share ``workers`` child processes. A call that takes longer than its reward's ``timeout_s``
    seconds per answer is killed with its process, which is restarted, and its answers have no reward. Answers also
    have no reward if their process dies, if an async reward takes too long, or if the reward raises.

    A reward that is not isolated has at most ``concurrency`` calls in flight. A plain function runs in threads, or
    in the event loop if it takes microseconds, because a thread would cost more than the call.

    The child processes run in the sandbox unless ``config.sandbox`` is "none" or the machine has none, which is
    logged. ``log_file`` receives their output. In the sandbox they may read the files of ``media_folder``.
    ``on_hang`` is called with an error, in another thread, if a reward that is not isolated takes longer than
    ``config.timeout_s`` per answer, because such a call cannot be ended. Raises ValueError as `RewardChoice` does.
    """

    def __init__(
        self,
        spec: RewardSpec,
        config: RewardConfig,
        *,
        workers: int,
        concurrency: int = 1,
        log_file: Path | None = None,
        media_folder: str = "",
        on_hang: OnHang | None = None,
    ) -> None:
        contain_exits()
        self.failures = RewardFailures(config)
        self._choice = RewardChoice(spec, config)
        self._shadow_share, self._on_hack = config.shadow_share, config.on_hack
        self._on_hang = on_hang
        self._log = None if log_file is None else LimitedLog(log_file, max_bytes=_LOG_BYTES)
        self._media_folder = media_folder
        self._worker_count = workers
        self._workers: list[RewardWorker] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()  # indices of workers
        self._worker_times = WorkerTimes()
        self._worker_threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="reward worker")
        if isolated := [reward for reward in self._choice.known() if reward.spec.isolated]:
            self._start_workers(isolated)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")
        self._calls = asyncio.Semaphore(concurrency)  # limits the calls of async rewards
        self._closed = False
        self._running = {reward.label: _RunningReward(reward, on_hang) for reward in self._choice.known()}

    def _start_workers(self, rewards: Sequence[ChosenReward]) -> None:
        configs = [reward.config for reward in rewards]
        sandbox = reward_sandbox(self._choice, rewards, media_folder=self._media_folder)
        log = None if self._log is None else self._log.descriptor
        self._workers = [RewardWorker(configs, log=log, sandbox=sandbox) for _ in range(self._worker_count)]
        for index in range(len(self._workers)):
            self._idle.put(index)

    def check_row(self, row: DataRow, where: str) -> None:
        """Raises `BadRow` for a data row that its reward cannot score; ``where`` is the row's file and line."""
        self._choice.check_row(row, where)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of the answers to one data row, in order.

        Raises `RewardsFailed` if too many of the newest answers have no reward, `RewardUnusable` as a reward does, and
        RuntimeError if a worker cannot start or the pool was closed.
        """
        outcomes = await self._with_shadow(inputs, await self._outcomes(inputs))
        for given, (output, error) in zip(inputs, outcomes, strict=True):
            self.failures.record(given, output, error)
        return [output for output, _ in outcomes]

    async def _with_shadow(self, inputs: Sequence[RewardInput], outcomes: list[Outcome]) -> list[Outcome]:
        """Returns the outcomes, with the verdicts of the shadow if it scores this group."""
        shadow, first = self._choice.shadow, inputs[0]
        if shadow is None or (first.is_trained and not self._has_shadow(first.uid.rpartition(".")[0])):
            return outcomes
        if shadow.spec.check_row is not None:
            try:
                shadow.spec.check_row(first.row, shadow.config)
            except ValueError:  # a label that it cannot judge
                return outcomes
        found = await self._scored(shadow, inputs)
        mask = self._on_hack == MASK and first.is_trained
        return [
            (with_shadow(output, seen, mask=mask), error)
            for (output, error), (seen, _) in zip(outcomes, found, strict=True)
        ]

    def _has_shadow(self, group: str) -> bool:
        """Returns whether the shadow scores the answers of a group of training; this depends on the group's uid."""
        return self._on_hack == MASK or zlib.crc32(group.encode()) < self._shadow_share * 2**32

    async def _outcomes(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        row = inputs[0].row
        try:
            chosen = self._choice.of_row(row)
        except ValueError as error:  # a held-out row; the check of the data leaves out such training rows
            return [(RewardOutput(reward=None, reason=str(error)), None)] * len(inputs)
        if chosen.spec.combine is None:
            return self._choice.routed(chosen, await self._scored(chosen, inputs))
        parts = self._choice.parts_of(row)
        found = await asyncio.gather(*(self._scored(part, inputs) for part in parts))
        labels = [part.label for part in parts]
        return [
            self._choice.combined(given, dict(zip(labels, of_answer, strict=True)))
            for given, of_answer in zip(inputs, zip(*found, strict=True) if found else [()] * len(inputs), strict=True)
        ]

    async def _scored(self, chosen: ChosenReward, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Returns the outcomes of one reward."""
        if chosen.label not in self._running:
            self._running[chosen.label] = _RunningReward(chosen, self._on_hang)
        reward = self._running[chosen.label]
        groups = [inputs] if reward.spec.score_group is not None else [[given] for given in inputs]
        return [outcome for call in await self._calls_of(reward, groups, inputs) for outcome in call]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of each training reward since the last call, and the times of the workers.

        Metrics of a reward are named reward/NAME/METRIC (`RewardMetrics`), those of a worker as in `WorkerTimes`.
        """
        return self._worker_times.take() | {
            f"reward/{label.rpartition('/')[2]}/{key}": value
            for label, reward in self._running.items()
            for key, value in reward.figures.take().items()
        }

    async def _calls_of(
        self, reward: _RunningReward, groups: Sequence[Sequence[RewardInput]], inputs: Sequence[RewardInput]
    ) -> list[list[Outcome]]:
        """Returns the outcomes of each call that scores these answers, in order."""
        if reward.spec.is_async:
            return await asyncio.gather(*(self._awaited(reward, call) for call in groups))
        loop = asyncio.get_running_loop()
        if reward.spec.isolated:
            if not self._workers and not self._closed:
                self._start_workers([reward.chosen])
            threads = self._worker_threads
            return await asyncio.gather(
                *(loop.run_in_executor(threads, self._in_worker, reward, call) for call in groups)
            )
        if reward.answer_s * len(inputs) <= IN_LOOP_S:
            return [self._in_process(reward, inputs)]
        calls = groups if reward.answer_s > ALONE_S else [inputs]
        return await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._in_process, reward, call) for call in calls)
        )

    async def _awaited(self, reward: _RunningReward, inputs: Sequence[RewardInput]) -> list[Outcome]:
        async with self._calls:
            with reward.hang_watch(_LATE * len(inputs)):  # a call that blocks the event loop cannot be cancelled
                with reward.timed(inputs) as outcomes:
                    outcomes += await score_async(reward.spec, inputs, reward.config)
                return outcomes

    def _in_worker(self, reward: _RunningReward, inputs: Sequence[RewardInput]) -> list[Outcome]:
        index = self._idle.get_nowait()  # never empty, because there are as many threads as workers
        began = time.perf_counter()
        try:
            with reward.timed(inputs) as outcomes:
                outcomes += [(output, None) for output in self._workers[index].score(inputs, reward.config)]
            if inputs[0].is_trained:
                self._worker_times.record(index, answers=len(inputs), seconds=time.perf_counter() - began)
            return outcomes
        finally:
            self._idle.put(index)

    def _in_process(self, reward: _RunningReward, inputs: Sequence[RewardInput]) -> list[Outcome]:
        began = time.perf_counter()
        at_once = 1 if reward.spec.score_group is None else len(inputs)
        with reward.hang_watch(at_once) as on_answer, reward.timed(inputs) as outcomes:
            outcomes += score_sync(reward.spec, inputs, reward.config, on_answer=on_answer)
        answer_s = (time.perf_counter() - began) / len(inputs)
        lately_s = reward.answer_s if reward.answer_s < float("inf") else 0.0
        reward.answer_s = max(answer_s, _PACE_KEPT * lately_s)
        return outcomes

    def close(self) -> None:
        """Ends all workers; may be called twice.

        Calls in flight in worker processes return without a reward. Calls in threads are not waited for.
        """
        again, self._closed = self._closed, True
        for worker in self._workers:
            worker.process.stop()
        if self._log is not None and not again:
            self._log.close()  # after the last restart of a worker
        for reward in self._running.values():
            if reward.watch is not None:
                reward.watch.close()
        # A thread that waits for a worker's answer notices its end, and later calls find the worker stopped.
        self._worker_threads.shutdown(wait=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.process.close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

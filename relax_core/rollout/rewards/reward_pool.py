"""Scores groups with the run's rewards: in the event loop, in threads, or in worker processes."""

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

REWARD_CALLS = 64  # concurrent calls of rewards that are not isolated, per rollout worker
IN_LOOP_S = 1e-3  # a faster group is scored in the event loop, because a thread costs about as much
ALONE_S = 1e-3  # a slower answer is scored in a separate thread
_LOG_BYTES = 64 * 2**20  # limit of the output of workers, because a reward or an answer may print without end
_LATE = 1.8  # hang limit of an async call, as a multiple of the time limit at which it is cancelled
_PACE_KEPT = 0.9  # decay of the longest answer time per call; the effect of a slow answer lasts some tens of calls


class _RunningReward:
    """Holds a reward of a pool with its metrics, its hang watch, and its recent answer time."""

    def __init__(self, chosen: ChosenReward, on_hang: OnHang | None) -> None:
        self.chosen, self.spec, self.config = chosen, chosen.spec, chosen.config
        watched = on_hang is not None and not chosen.spec.isolated
        self.watch = HangWatch(chosen.config, on_hang, shared=not chosen.spec.is_async) if watched and on_hang else None
        self.answer_s = float("inf")  # the longest recent time of an answer; infinite before the first group
        self.figures = RewardMetrics()

    def hang_watch(self, answers: float) -> AbstractContextManager[Callable[[], None]]:
        """Returns the context of `HangWatch.scoring`; without a hang watch, a context without effect."""
        return nullcontext(lambda: None) if self.watch is None else self.watch.scoring(answers)

    @contextmanager
    def timed(self, inputs: Sequence[RewardInput]) -> Iterator[list[Outcome]]:
        """Yields a list for a call's outcomes, and counts them with the call's time; evaluations are not counted."""
        outcomes: list[Outcome] = []
        began = time.perf_counter()
        yield outcomes
        if inputs[0].is_trained:
            self.figures.record([output for output, _ in outcomes], seconds=time.perf_counter() - began)


class RewardPool:
    """Scores groups with a run's rewards, many groups at the same time; a pool belongs to one event loop.

    A data row is scored by the run's reward, by the reward that the row names (``config.by``), or by the combination of
    ``config.parts``.

    A shadow reward is a second, independent reward. If it is configured, it scores the share ``config.shadow_share`` of
    the training groups, and all answers of evaluations; its verdicts become two more parts of the rewards. With
    ``config.on_hack`` mask it scores all groups. A training answer then has no reward if the main reward judges the
    answer right and the shadow reward judges it wrong.

    Isolated rewards share ``workers`` child processes. If a call takes longer than the reward's ``timeout_s`` seconds
    per answer, its process is killed and restarted, and its answers have no reward. Answers also have no reward if
    their process dies, if an async reward takes too long, or if the reward raises an exception.

    Rewards that are not isolated have at most ``concurrency`` calls in flight. A plain function runs in threads. If a
    call takes only microseconds, the function runs in the event loop, because a thread would cost more than the call.

    The child processes run in the sandbox. They run without the sandbox if ``config.sandbox`` is "none", or if the
    machine cannot run the sandbox (logged). ``log_file`` receives the output of the processes. In the sandbox, the
    processes may read the files of ``media_folder``. If a reward that is not isolated takes longer than
    ``config.timeout_s`` per answer, ``on_hang`` is called with an error in another thread, because such a call cannot
    be ended. Raises the ValueError of `RewardChoice`.
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
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()  # indices of workers that make no call
        self._worker_times = WorkerTimes()
        self._worker_threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="reward worker")
        if isolated := [reward for reward in self._choice.known() if reward.spec.isolated]:
            self._start_workers(isolated)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")
        self._calls = asyncio.Semaphore(concurrency)  # limits the concurrent calls of async rewards
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
        """Raises `BadRow` if the reward of a data row cannot score the row; ``where`` is the row's file and line."""
        self._choice.check_row(row, where)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of the answers to one data row, in order.

        Raises `RewardsFailed` if too many of the newest answers have no reward, `RewardUnusable` if a reward raises it,
        and RuntimeError if a worker cannot start or the pool was closed.
        """
        outcomes = await self._with_shadow(inputs, await self._outcomes(inputs))
        for given, (output, error) in zip(inputs, outcomes, strict=True):
            self.failures.record(given, output, error)
        return [output for output, _ in outcomes]

    async def _with_shadow(self, inputs: Sequence[RewardInput], outcomes: list[Outcome]) -> list[Outcome]:
        """Returns the outcomes; if the shadow reward scores this group, with its verdicts."""
        shadow, first = self._choice.shadow, inputs[0]
        if shadow is None or (first.is_trained and not self._has_shadow(first.uid.rpartition(".")[0])):
            return outcomes
        if shadow.spec.check_row is not None:
            try:
                shadow.spec.check_row(first.row, shadow.config)
            except ValueError:  # the shadow reward cannot judge this label
                return outcomes
        found = await self._scored(shadow, inputs)
        mask = self._on_hack == MASK and first.is_trained
        return [
            (with_shadow(output, seen, mask=mask), error)
            for (output, error), (seen, _) in zip(outcomes, found, strict=True)
        ]

    def _has_shadow(self, group: str) -> bool:
        """Returns whether the shadow reward scores a training group; the result depends on the group's uid."""
        return self._on_hack == MASK or zlib.crc32(group.encode()) < self._shadow_share * 2**32

    async def _outcomes(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        row = inputs[0].row
        try:
            chosen = self._choice.of_row(row)
        except ValueError as error:  # only for held-out rows: the check of the data leaves out such training rows
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
        """Returns the outcomes of one reward, one per answer."""
        if chosen.label not in self._running:
            self._running[chosen.label] = _RunningReward(chosen, self._on_hang)
        reward = self._running[chosen.label]
        groups = [inputs] if reward.spec.score_group is not None else [[given] for given in inputs]
        return [outcome for call in await self._calls_of(reward, groups, inputs) for outcome in call]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of each training reward since the last call, and the times of the workers.

        Metrics of a reward have the names reward/NAME/METRIC (`RewardMetrics`). Metrics of a worker have the names of
        `WorkerTimes`.
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

        Calls in flight in worker processes return outcomes without a reward. The method does not wait for calls in
        threads.
        """
        again, self._closed = self._closed, True
        for worker in self._workers:
            worker.process.stop()
        if self._log is not None and not again:
            self._log.close()  # after the last restart of a worker
        for reward in self._running.values():
            if reward.watch is not None:
                reward.watch.close()
        # A thread that waits for a worker's answer notices the worker's end. Later calls find the worker stopped.
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

"""Builds the engine pool and the reward pool of a rollout worker.

The two pools record their waits as the worker's waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import SILENT_S, SYNC_TIMEOUT_S
from relax_core.contracts.judge import JudgedInput
from relax_core.contracts.monitor import Waiting
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_states import RequestTimes
from relax_core.observe.event_log import EventWriter
from relax_core.roles.engine_directory import EngineDirectory, engine_media
from relax_core.roles.role_context import RunContext
from relax_core.rollout.judges.judge_pool import JudgePool, check_judges
from relax_core.rollout.media_encoding import item_work_of
from relax_core.rollout.rewards.hang_watch import OnHang
from relax_core.rollout.rewards.reward_pool import REWARD_CALLS, RewardPool
from relax_core.rollout.rollout_loop import Record

OWNER_FIRST_S = 10.0  # if an engine does not start, its owner reports this first, because it knows the cause
JUDGED_ROWS = 8  # number of groups per train step for which the first answer is kept with the judges' texts
JUDGED = "judged"  # kind of text records with the judges' texts about answers


def traced_pool(context: RunContext, directory: EngineDirectory, waiting: Waiting) -> EnginePool:
    """Returns the pool of the configured engines; ``directory`` makes the pool's clients."""
    config, media = context.config, engine_media(context)
    return EnginePool(
        config.engine.count,
        directory.client_async,
        timeout_s=config.engine.start_timeout_s + OWNER_FIRST_S,
        silent_s=SILENT_S,
        by_load=not config.in_order,  # with in_order, the same seed gives bitwise equal results for any timing
        max_lag=config.mode.versions_in_flight - 1,
        lag_s=SYNC_TIMEOUT_S,
        waiting=waiting,
        fetch_media=None if media is None else media.fetch_requests,
        item_work=None if context.media_folder is None else item_work_of(config, model_folder=context.model_folder),
        on_malformed=directory.report_malformed,
    )


class TracedRewardPool(RewardPool):
    """Extends the reward pool: records scoring as a wait of this worker, because a reward may hang in this process.

    ``judges`` are the judges of the run's reward, None for a reward without judges.
    """

    def __init__(
        self,
        spec: RewardSpec,
        config: RewardConfig,
        *,
        workers: int,
        log_file: Path,
        media_folder: str,
        on_hang: OnHang,
        waiting: Waiting,
        name: str,
        judges: JudgePool | None = None,
    ) -> None:
        super().__init__(
            spec,
            config,
            workers=workers,
            concurrency=REWARD_CALLS,
            log_file=log_file,
            media_folder=media_folder,
            on_hang=on_hang,
        )
        self._waiting = waiting
        self._name = name
        self._judges = judges
        self._judged: deque[dict[str, str]] = deque(maxlen=JUDGED_ROWS)

    async def score(self, inputs: Sequence[RewardInput]) -> list[RewardOutput]:
        """Returns the outputs of the answers to one data row, as `RewardPool.score` does."""
        with self._waiting(f"rewards of {len(inputs)} responses", on=self._name):
            if self._judges is None:
                return await super().score(inputs)
            async with self._judges.of_group() as asking:
                outputs = await super().score([JudgedInput.of(given, asking) for given in inputs])
            self._judged.append(_judged_row(inputs[0], outputs[0]))
            return outputs

    async def check_judges(self, config: RelaxConfig, record: Callable[[Mapping[str, float]], None]) -> None:
        """Tests the judges on known verdicts (`relax_core.rollout.judges.judge_pool.check_judges`)."""
        if self._judges is not None:
            with self._waiting("verdicts on known answers", on=self._name):
                await check_judges(config, self._judges, record)

    async def close_judges(self) -> None:
        """Ends the connections to the judges."""
        if self._judges is not None:
            await self._judges.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the rewards and of the judges since the last call."""
        return super().metrics() | ({} if self._judges is None else self._judges.metrics())

    def judged_rows(self) -> list[dict[str, str]]:
        """Returns the first answer of each of the newest groups since the last call, with the judges' texts."""
        rows = list(self._judged)
        self._judged.clear()
        return rows


def _judged_row(given: RewardInput, output: RewardOutput) -> dict[str, str]:
    reward = "none" if output.reward is None else f"{output.reward:g}"
    return {
        "uid": given.uid,
        "answer": given.answer,
        "response": given.response,
        "reward": reward,
        "why": output.why or output.reason,
    }


def record_with_rewards(
    metrics: EventWriter, rewards: TracedRewardPool, requests: RequestTimes, own: Mapping[str, float]
) -> Record:
    """Returns a function that records metrics together with ``own`` and new metrics of rewards, judges and engines."""

    def record(source: str, step: int, values: Mapping[str, float]) -> None:
        metrics.record(source, step, {**values, **rewards.metrics(), **requests.take(), **own})
        if rows := rewards.judged_rows():
            metrics.record_texts(JUDGED, step, rows)

    return record

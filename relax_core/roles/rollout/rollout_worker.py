"""The worker of the rollout role, which builds the rollout loop and the evaluator and runs them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import threading
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from relax_core.bus.ray_bus import RayBus
from relax_core.config.choices import Partial
from relax_core.config.modality import media_kinds
from relax_core.contracts.algorithm import AlgorithmSpec
from relax_core.contracts.bus import CALL_TIMEOUT_S, Admission, BusClosed
from relax_core.contracts.env import EnvSpec
from relax_core.contracts.reward import RewardConfig, reward_parts
from relax_core.contracts.stop_signals import ignore_stop_signals
from relax_core.data.eval_sets import held_out_count
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.observe.event_log import EventWriter, bad_rows_kind
from relax_core.registry import find_algorithm, find_reward
from relax_core.roles.discovery import discover_bus
from relax_core.roles.engine_directory import EngineDirectory
from relax_core.roles.failure import first_cause
from relax_core.roles.judge_engine import run_judges
from relax_core.roles.role_context import RunContext
from relax_core.roles.rollout.engine_follower import EngineFollower, engine_follower
from relax_core.roles.rollout.run_evaluations import open_evaluator
from relax_core.roles.rollout.traced_rollout import TracedRewardPool, record_with_rewards, traced_pool
from relax_core.roles.rollout.versions_reached import CLOSED_S, VersionsReached
from relax_core.roles.sample_logs import keep_media, open_sample_log
from relax_core.roles.worker import Worker
from relax_core.rollout.bad_rows import BadRows
from relax_core.rollout.env_workers.run_env import RunEnv
from relax_core.rollout.episodes.group_assembly import GroupFilter
from relax_core.rollout.episodes.group_player import EarlyEnds
from relax_core.rollout.evaluation.evaluator import Evaluator
from relax_core.rollout.group_advantages import computes_advantages_per_group, group_advantages
from relax_core.rollout.held_items import HeldItems
from relax_core.rollout.item_cache import ItemCache
from relax_core.rollout.judges.judge_choice import judge_plan
from relax_core.rollout.media_encoding import open_encoders
from relax_core.rollout.prompt_admissions import RolloutLoopSettings
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rollout_loop import Record, RolloutLoop
from relax_core.rollout.sampling_params import training_sampling
from relax_core.rollout.teacher_choice import teacher_chooser
from relax_core.rollout.weight_update_handler import MAX_ABORTS, WeightUpdateHandler

if TYPE_CHECKING:
    from relax_core.data.media.encode_pool import EncodePool

log = logging.getLogger(__name__)
REWARD_LOG = "reward.log"  # the output of an isolated reward's worker processes
CLOSE_SAMPLES_S = 10.0


class RolloutWorker(Worker):
    """Is rollout worker ``rank``. Its state is in the bus, so a restarted worker reclaims its predecessor's groups.

    Several workers share the prompts of a step; only the first one evaluates.
    """

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank  # set before the loop starts, because the loop reads it
        self._evaluated = threading.Event()
        self._follower: EngineFollower | None = None
        ignore_stop_signals()  # users' envs and rewards could otherwise end on them
        super().__init__(name, context)

    def work(self) -> None:
        """Samples and evaluates until the bus closes."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        context, config = self.context, self.context.config
        bus = discover_bus(self.context, self.waiting)
        metrics = context.event_writer(self.name)
        directory = EngineDirectory(context)
        pool = traced_pool(context, directory, self.waiting)
        self._follower = await engine_follower(context, pool, directory)
        source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config))
        run_env = RunEnv(config, log_dir=context.log_dir, rank=self._rank)
        reclaimed = await self._reclaim(bus)
        encoders = await asyncio.to_thread(self._encoders, bus)
        rewards = self._rewards()  # its workers see the folder of media, which is there now
        prompts = self._prompts(run_env.env, encoders, bus)
        spec = find_algorithm(config.algo.name)
        teachers = spec.requirements(config.algo).teacher
        advantages = group_advantages(spec, config) if computes_advantages_per_group(config) else None
        reached, evaluator = await self._versions(bus), None
        if self._rank == 0:
            await rewards.check_judges(config, partial(metrics.record, "judge_check", context.start_step))
            evaluator = await open_evaluator(
                context, source, reached, metrics, pool=pool, prompts=prompts, rewards=rewards, run_env=run_env
            )
        settings = self._settings(prompts.tokenizer)
        serving = AsyncExitStack()
        await serving.enter_async_context(run_env.serving(prompts.tokenizer, token=context.token_file.read_text()))
        player = run_env.player(
            prompts, pool, settings.sampling, seed=config.seed, ends=self._early_ends(), reached=reached.wait
        )
        samples = open_sample_log(context, self.name, tokenizer=self._rank == 0)
        loop = RolloutLoop(
            bus=bus,
            source=source,
            prompts=prompts,
            rewards=rewards,
            settings=settings,
            record=self._record(metrics, rewards, pool),
            gate=_no_gate if evaluator is None else evaluator.gate,
            bad_rows=self._bad_rows(len(source), metrics),
            refuse=group_filter(spec, config.algo, config.reward),
            teacher_of=None if teachers is None else teacher_chooser(teachers),
            weight_update_handler=self._weight_update_handler(bus, pool),
            advantages=advantages,
            player=player,
            samples=samples,
        )
        self.set_state("running")
        try:
            await self._run_loops(
                loop, evaluator, reclaimed=reclaimed, metrics=metrics, needs_torch=advantages is not None
            )
        except* Exception as failures:
            raise first_cause(failures) from failures
        finally:
            await serving.aclose()
            await _close(rewards, run_env, encoders)
            if samples is not None:
                await asyncio.to_thread(samples.close, timeout_s=CLOSE_SAMPLES_S)

    async def _run_loops(
        self,
        loop: RolloutLoop,
        evaluator: Evaluator | None,
        *,
        reclaimed: list[Admission] | BusClosed,
        metrics: EventWriter,
        needs_torch: bool,
    ) -> None:
        """Samples and evaluates, and follows the list of the engines until both have ended."""
        assert self._follower is not None
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follower.follow())
            if needs_torch:  # torch is imported before the engine has its first weights
                group.create_task(asyncio.to_thread(importlib.import_module, "torch"))
            work = [] if evaluator is None else [group.create_task(self._evaluate(evaluator, metrics))]
            work.append(group.create_task(self._sample(loop, reclaimed)))
            await asyncio.wait(work)
            following.cancel()

    def open_samples(self, engine: int) -> int:
        """Returns how many samples this engine owes to this worker, which sends it no more if it is to leave."""
        timeout_s = CALL_TIMEOUT_S
        return 0 if self._follower is None else self._follower.open_samples(engine, timeout_s=timeout_s)

    def _bad_rows(self, rows: int, metrics: EventWriter) -> BadRows:
        config, step = self.context.config, self.context.start_step
        return BadRows(
            rows=rows,
            most=config.data.max_bad_rows,
            report=lambda bad: metrics.record_texts(bad_rows_kind(self._rank), step, bad),
        )

    def _early_ends(self) -> EarlyEnds:
        config = self.context.config
        return EarlyEnds(
            quorum=config.rollout.quorum,
            grace_s=config.rollout.quorum_grace_s,
            most_lag=config.mode.most_lag,
        )

    def _encoders(self, bus: RayBus) -> EncodePool | None:
        """Returns the processes that encode images and videos, or None for a run on text."""
        context = self.context
        if context.media_folder is None:
            return None
        return open_encoders(
            context.config,
            model_folder=context.model_folder,
            media_folder=asyncio.run(bus.media_folder(timeout_s=context.config.run.start_timeout_s)),
            log_dir=context.log_dir,
        )

    def _prompts(self, env: EnvSpec, encoders: EncodePool | None, bus: RayBus) -> PromptMaker:
        context, config = self.context, self.context.config
        return PromptMaker(
            env=env,
            env_config=config.env,
            tokenizer=PromptTokenizer(
                context.model_folder,
                template_arguments=config.data.chat_template_kwargs,
                date=config.data.template_date,
            ),
            max_prompt_tokens=config.engine.context_tokens - config.rollout.max_new_tokens,
            overlong=config.data.overlong,
            last_assistant=config.data.last_assistant,
            items=None if encoders is None else self._items(encoders, bus),
            media_kinds=media_kinds(config),
        )

    def _items(self, encoders: EncodePool, bus: RayBus) -> ItemCache:
        config = self.context.config
        held = HeldItems(encoders, bus, worker=self._rank, timeout_s=CALL_TIMEOUT_S)
        return ItemCache(
            held,
            most_bytes=config.modality.cache_mb * 1_000_000,
            let_go=held.let_go,
            on_encoded=keep_media(self.context, first=self._rank == 0),
        )

    def _rewards(self) -> TracedRewardPool:
        config = self.context.config
        return TracedRewardPool(
            find_reward(config.reward.name),
            config.reward,
            workers=config.rollout.reward_workers,
            concurrency=config.rollout.reward_concurrency,
            log_file=self.context.log_dir / REWARD_LOG,
            media_folder=str(self.context.media_folder or ""),
            on_hang=self.fail,
            waiting=self.waiting,
            name=self.name,
            judges=None if judge_plan(config) is None else run_judges(self.context),
        )

    def _weight_update_handler(self, bus: RayBus, pool: EnginePool) -> WeightUpdateHandler | None:
        """Returns the handler, or None if a new weight version ends and aborts no groups."""
        rollout = self.context.config.rollout
        aborts = rollout.partial is Partial.abort
        if not (aborts or rollout.spare_prompts):
            return None
        call_timeout_s = CALL_TIMEOUT_S
        return WeightUpdateHandler(
            bus,
            pool,
            max_aborts=MAX_ABORTS if aborts else 0,
            call_timeout_s=call_timeout_s,
            worker=self._rank,
        )

    def _record(self, metrics: EventWriter, rewards: TracedRewardPool, pool: EnginePool) -> Record:
        """Returns the function that records metrics; with several workers a record names its worker."""
        own = {"worker": float(self._rank)} if self.context.config.rollout.workers > 1 else {}
        return record_with_rewards(metrics, rewards, pool.request_times, own)

    async def _reclaim(self, bus: RayBus) -> list[Admission] | BusClosed:
        """Returns the admissions of an earlier process of this worker, or that the bus is closed.

        The bus then ends what that process held, so this comes before any encoding.
        """
        try:
            timeout_s = CALL_TIMEOUT_S
            return await bus.reclaim(worker=self._rank, timeout_s=timeout_s)
        except BusClosed as closed:
            return closed

    async def _sample(self, loop: RolloutLoop, reclaimed: list[Admission] | BusClosed) -> None:
        try:
            if isinstance(reclaimed, BusClosed):
                raise reclaimed
            await loop.run(reclaimed)
        except BusClosed as closed:  # sampling has ended; the last evaluation may still be to come
            self.set_state("running", str(closed))

    async def _evaluate(self, evaluator: Evaluator, metrics: EventWriter) -> None:
        """Runs the evaluations; the last one counts once its record is in the run's files.

        A stop ends them and the sampling that waits for them, because the engine may never get their weights.
        """
        running = asyncio.create_task(evaluator.run())
        try:
            while not running.done() and not self.stopping:
                await asyncio.wait({running}, timeout=CLOSED_S)
            if not running.done():
                raise BusClosed("the run was stopped before its next evaluation")
            running.result()
            await asyncio.to_thread(self._write_out, metrics)
            self._evaluated.set()
        finally:
            running.cancel()

    def _write_out(self, metrics: EventWriter) -> None:
        try:
            metrics.flush()
        except TimeoutError as error:
            log.warning("the last evaluation may be missing in the metrics: %s", error)

    def wait_evaluated(self, timeout_s: float) -> bool:
        """Waits for the end of the last evaluation; returns False past the deadline or if the loop ends without it."""
        deadline = time.monotonic() + timeout_s
        while not self._evaluated.wait(0.2):
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
        return True

    def _settings(self, tokenizer: PromptTokenizer) -> RolloutLoopSettings:
        config = self.context.config
        rollout = config.rollout
        return RolloutLoopSettings(
            seed=config.seed,
            batch_prompts=math.ceil((rollout.prompts_per_step + rollout.spare_prompts) / rollout.workers),
            sampling=training_sampling(config, tokenizer),
            admit_timeout_s=config.run.stall_timeout_s,
            call_timeout_s=CALL_TIMEOUT_S,
            max_failed_groups=rollout.max_failed_groups or 4 * rollout.prompts_per_step,
            worker=self._rank,
            alone=rollout.workers == 1,
            mask_off_policy=rollout.mask_off_policy,
            mask_truncated=rollout.mask_truncated,
            in_order=config.in_order,
            media_folder=str(self.context.media_folder or ""),
        )

    async def _versions(self, bus: RayBus) -> VersionsReached:
        call_s = CALL_TIMEOUT_S
        now = (await bus.progress(timeout_s=call_s)).version
        return VersionsReached(bus, version=now, call_timeout_s=call_s, stopping=lambda: self.stopping)


async def _no_gate(version: int) -> None: ...


async def _close(rewards: TracedRewardPool, run_env: RunEnv, encoders: EncodePool | None) -> None:
    rewards.close()
    await rewards.close_judges()
    run_env.close()
    if encoders is not None:
        encoders.close()


def group_filter(spec: AlgorithmSpec, config: object, reward: RewardConfig) -> GroupFilter | None:
    """Returns the algorithm's filter of complete groups, or None if it trains on all groups."""
    drop_group = spec.drop_group
    if drop_group is None:
        return None
    parts = [part.label for part in reward_parts(reward)] if find_reward(reward.name).combine is not None else []
    return GroupFilter(lambda rewards, dropped_in_a_row: drop_group(rewards, dropped_in_a_row, config), parts=parts)

"""Implements the worker of the rollout role, which builds and runs the rollout loop and the evaluator.

At its start the worker connects to the bus and the engines and opens the env. Then the worker reclaims the groups of
its earlier process, and starts the processes that encode media and compute rewards. Last, the worker opens the
evaluator (first worker only) and the endpoint of agents. Then three loops run concurrently: `EngineFollower.follow`
follows the list of engines, `_sample` runs the rollout loop, and `_evaluate` runs the evaluations. The loops end when
the bus closes or at the first failure. Then the worker closes the endpoint, rewards, judges, env workers, encoders and
the log of samples, in this order.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError

from relax_core.bus.ray_bus import RayBus, blocking
from relax_core.config.choices import Partial
from relax_core.config.modality import media_kinds
from relax_core.contracts.algorithm import AlgorithmSpec
from relax_core.contracts.bus import CALL_TIMEOUT_S, Admission, BusClosed
from relax_core.contracts.data import PromptSource
from relax_core.contracts.env import EnvSpec
from relax_core.contracts.reward import RewardConfig, reward_parts
from relax_core.contracts.stop_signals import ignore_stop_signals
from relax_core.data.eval_sets import eval_sets, held_out_count
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.observe.event_log import EVAL, SKELETONS, EventWriter, bad_rows_kind, read_texts
from relax_core.registry import find_algorithm, find_reward
from relax_core.roles.discovery import discover_bus, discover_worker
from relax_core.roles.engine_directory import EngineDirectory, member_list
from relax_core.roles.failure import first_cause
from relax_core.roles.judge_engine import run_judges
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.sample_logs import keep_media, open_sample_log
from relax_core.roles.traced_rollout import TracedRewardPool, record_with_rewards, traced_pool
from relax_core.roles.worker import Worker
from relax_core.rollout.answer_skeletons import FEWEST_FIRST, AnswerStats, stats_of_rows
from relax_core.rollout.dynamic_sampling import GroupFilter
from relax_core.rollout.env_workers.configured_env import ConfiguredEnv
from relax_core.rollout.episodes.group_assembly import MakeExtras
from relax_core.rollout.episodes.group_player import EarlyEnds
from relax_core.rollout.evaluator import Evaluator, answer_sets, eval_versions, prepared_sets, versions_left
from relax_core.rollout.feeder_loop import FeederLoop
from relax_core.rollout.group_advantages import computes_advantages_per_group, group_advantages
from relax_core.rollout.item_cache import CACHE_BYTES, HeldItems, ItemCache
from relax_core.rollout.judges.judge_choice import judge_plan
from relax_core.rollout.media_encoding import open_encoders
from relax_core.rollout.partial_rollout import MAX_ABORTS, WeightUpdateHandler
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rollout_loop import BadRows, Record, RolloutLoop, RolloutLoopSettings, teacher_chooser
from relax_core.rollout.sampling_params import training_sampling
from relax_core.weights.engine_members import MemberList

if TYPE_CHECKING:
    from relax_core.data.media.encode_pool import EncodePool

FOLLOW_S = 0.25  # interval in seconds between reads of the list of engines


async def engine_follower(context: RunContext, pool: EnginePool, directory: EngineDirectory) -> EngineFollower:
    """Returns the follower that updates ``pool``; ``directory`` makes the pool's clients.

    The follower has already read the list of engines once, so prompts can be sent to the pool.
    """
    follower = EngineFollower(pool, member_list(context), close_client=directory.close_client)
    await follower.read()
    return follower


class EngineFollower:
    """Applies the list of the run's engines to ``pool``; it belongs to the pool's event loop.

    ``close_client`` closes the pool's client of an engine that has left.
    """

    def __init__(
        self, pool: EnginePool, members: MemberList, *, close_client: Callable[[int], Awaitable[None]]
    ) -> None:
        self._close_client = close_client
        self._pool = pool
        self._members = members
        self._told = members.at_start
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.Lock()  # so an older list is never applied after a newer list

    async def follow(self) -> None:
        """Repeatedly reads the list of engines, until this task is cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(FOLLOW_S)

    async def read(self) -> None:
        """Reads the list of engines and applies the changes to the pool.

        Each call moves the prompts of engines in the state "moving" to different engines. One call is not enough,
        because a request that was in flight at the change of state may arrive after the first abort.
        """
        async with self._reading:
            members = await asyncio.to_thread(self._members.read)
            moved = members.in_state("moving")
            if members != self._told or moved:
                gone = set(self._told.numbers) - set(members.numbers)
                self._told = members
                leaving = members.in_state("leaving", "moving")
                await self._pool.change_engines(members.in_state("serving"), leaving=leaving, moved=moved)
                for engine in gone:
                    await self._close_client(engine)

    async def _open_samples(self, engine: int) -> int:
        await self.read()
        return self._pool.open_samples(engine)

    def open_samples(self, engine: int, *, timeout_s: float) -> int:
        """Returns the number of an engine's open samples after the newest list is applied.

        Call this method from any thread except the event loop's thread. Raises TimeoutError if the event loop is not
        free in time.
        """
        return asyncio.run_coroutine_threadsafe(self._open_samples(engine), self._loop).result(timeout_s)


CLOSED_S = 0.2


class VersionsReached:
    """Holds the newest version that the bus has reported. One bus call at a time waits for a newer version.

    Only one event loop may use this object. ``stopping`` returns whether the worker is stopping.
    """

    def __init__(self, bus: RayBus, *, version: int, call_timeout_s: float, stopping: Callable[[], bool]) -> None:
        self._bus = bus
        self.version = version
        self._call_timeout_s = call_timeout_s
        self._stopping = stopping
        self._asking = asyncio.Lock()

    async def wait(self, version: int) -> None:
        """Returns when the run has reached ``version``; raises `BusClosed` if the run ends first."""
        while self.version < version:
            async with self._asking:
                if self.version < version:
                    await self._ask()

    async def _ask(self) -> None:
        progress = await self._bus.wait_progress(self.version, timeout_s=self._call_timeout_s)
        if progress.version == self.version and self._stopping():
            raise BusClosed("the run ended before this version")
        if progress.version == self.version:
            await asyncio.sleep(CLOSED_S)  # limits the rate of calls, because a closed bus answers at once
        self.version = progress.version


log = logging.getLogger(__name__)
REWARD_LOG = "reward.log"  # the output of an isolated reward's worker processes
CLOSE_SAMPLES_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """Holds the parts that one rollout worker uses to sample and evaluate.

    ``reclaimed`` has the admissions of the worker's earlier process, or `BusClosed` if the bus is closed. ``encoders``
    is None in a text-only run. ``advantages`` is None if another role computes the advantages.
    """

    bus: RayBus
    pool: EnginePool
    metrics: EventWriter
    source: PromptSource
    configured_env: ConfiguredEnv
    reclaimed: list[Admission] | BusClosed
    encoders: EncodePool | None
    rewards: TracedRewardPool
    prompts: PromptMaker
    spec: AlgorithmSpec
    advantages: MakeExtras | None
    reached: VersionsReached


class RolloutWorker(Worker):
    """Runs rollout worker ``rank``.

    Its state is in the bus, so a restarted worker reclaims the groups of its earlier process.

    Several workers share the prompts of a step; only the first worker evaluates.
    """

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank  # set before the loop starts, because the loop reads this attribute
        self._evaluated = threading.Event()
        self._follower: EngineFollower | None = None
        ignore_stop_signals()  # without this, the stop signals could end users' envs and rewards
        super().__init__(name, context)

    def work(self) -> None:
        """Samples and evaluates until the bus closes."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        bus, pool = await self._connect()
        parts = await self._load(bus, pool)
        evaluator = await self._evaluator(parts)
        closing = AsyncExitStack()
        loop = await self._rollout_loop(parts, evaluator, closing)
        self.set_state("running")
        try:
            await self._run_loops(parts, loop, evaluator)
        except* Exception as failures:
            raise first_cause(failures) from failures
        finally:
            await closing.aclose()

    async def _connect(self) -> tuple[RayBus, EnginePool]:
        """Returns the bus and the engine pool, after the first read of the list of engines."""
        bus = discover_bus(self.context, self.waiting)
        directory = EngineDirectory(self.context)
        pool = traced_pool(self.context, directory, self.waiting)
        self._follower = await engine_follower(self.context, pool, directory)
        return bus, pool

    async def _load(self, bus: RayBus, pool: EnginePool) -> RolloutParts:
        """Opens the data, the env, the rewards and the tokenizer, and reclaims the groups of a lost worker."""
        context, config = self.context, self.context.config
        metrics = context.event_writer(self.name)
        source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config))
        configured_env = ConfiguredEnv(config, log_dir=context.log_dir, rank=self._rank)
        reclaimed = await self._reclaim(bus)
        encoders = await asyncio.to_thread(self._encoders, bus)
        rewards = self._rewards()  # env workers can read the media folder, which exists now
        prompts = self._prompts(configured_env.env, encoders, bus)
        spec = find_algorithm(config.algo.name)
        return RolloutParts(
            bus=bus,
            pool=pool,
            metrics=metrics,
            source=source,
            configured_env=configured_env,
            reclaimed=reclaimed,
            encoders=encoders,
            rewards=rewards,
            prompts=prompts,
            spec=spec,
            advantages=group_advantages(spec, config) if computes_advantages_per_group(config) else None,
            reached=await self._versions(bus),
        )

    async def _evaluator(self, parts: RolloutParts) -> Evaluator | None:
        """Checks the judges and returns the evaluator; None except in the first worker."""
        if self._rank != 0:
            return None
        context = self.context
        await parts.rewards.check_judges(
            context.config, partial(parts.metrics.record, "judge_check", context.start_step)
        )
        return await open_evaluator(context, parts)

    async def _rollout_loop(
        self, parts: RolloutParts, evaluator: Evaluator | None, closing: AsyncExitStack
    ) -> RolloutLoop:
        """Returns the rollout loop. Opens the log of samples and the endpoint of agents for the loop.

        ``closing`` closes the endpoint first and the log last.
        """
        context, config, configured_env = self.context, self.context.config, parts.configured_env
        settings = self._settings(parts.prompts.tokenizer)
        samples = open_sample_log(context, self.name, tokenizer=self._rank == 0)
        if samples is not None:
            closing.push_async_callback(asyncio.to_thread, samples.close, timeout_s=CLOSE_SAMPLES_S)
        _close_at_end(parts, closing)
        await closing.enter_async_context(
            configured_env.serving(parts.prompts.tokenizer, token=context.token_file.read_text())
        )
        teachers = parts.spec.requirements(config.algo).teacher
        return RolloutLoop(
            bus=parts.bus,
            source=parts.source,
            prompts=parts.prompts,
            rewards=parts.rewards,
            settings=settings,
            record=self._record(parts.metrics, parts.rewards, parts.pool),
            gate=_no_gate if evaluator is None else evaluator.gate,
            bad_rows=self._bad_rows(len(parts.source), parts.metrics),
            refuse=group_filter(parts.spec, config.algo, config.reward),
            teacher_of=None if teachers is None else teacher_chooser(teachers),
            weight_update_handler=self._weight_update_handler(parts.bus, parts.pool),
            advantages=parts.advantages,
            player=configured_env.player(
                parts.prompts,
                parts.pool,
                settings.sampling,
                seed=config.seed,
                ends=self._early_ends(),
                reached=parts.reached.wait,
            ),
            samples=samples,
        )

    async def _run_loops(self, parts: RolloutParts, loop: RolloutLoop, evaluator: Evaluator | None) -> None:
        """Samples and evaluates; follows the list of engines until sampling and evaluation have ended."""
        assert self._follower is not None
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follower.follow())
            if parts.advantages is not None:  # imports torch early, while the engines wait for their first weights
                group.create_task(asyncio.to_thread(importlib.import_module, "torch"))
            work = [] if evaluator is None else [group.create_task(self._evaluate(evaluator, parts.metrics))]
            work.append(group.create_task(self._sample(loop, parts.reclaimed)))
            await asyncio.wait(work)
            following.cancel()

    def open_samples(self, engine: int) -> int:
        """Returns the number of this worker's open samples on an engine. A leaving engine gets no further samples."""
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
            max_lag=config.mode.max_lag,
        )

    def _encoders(self, bus: RayBus) -> EncodePool | None:
        """Returns the processes that encode images and videos, or None in a text-only run."""
        context = self.context
        if context.media_folder is None:
            return None
        return open_encoders(
            context.config,
            model_folder=context.model_folder,
            media_folder=blocking(bus.media_folder(timeout_s=context.config.run.start_timeout_s)),
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
        held = HeldItems(encoders, bus, worker=self._rank, timeout_s=CALL_TIMEOUT_S)
        return ItemCache(
            held,
            max_bytes=CACHE_BYTES,
            release_items=held.release_items,
            on_encoded=keep_media(self.context, first=self._rank == 0),
        )

    def _rewards(self) -> TracedRewardPool:
        config = self.context.config
        return TracedRewardPool(
            find_reward(config.reward.name),
            config.reward,
            workers=config.rollout.reward_workers,
            log_file=self.context.log_dir / REWARD_LOG,
            media_folder=str(self.context.media_folder or ""),
            on_hang=self.fail,
            waiting=self.waiting,
            name=self.name,
            judges=None if judge_plan(config) is None else run_judges(self.context),
        )

    def _weight_update_handler(self, bus: RayBus, pool: EnginePool) -> WeightUpdateHandler | None:
        """Returns the weight-update handler, or None if new weight versions never end or abort groups."""
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
        """Returns the function that records metrics. If there are several workers, a record has the worker's name."""
        own = {"worker": float(self._rank)} if self.context.config.rollout.workers > 1 else {}
        return record_with_rewards(metrics, rewards, pool.request_times, own)

    async def _reclaim(self, bus: RayBus) -> list[Admission] | BusClosed:
        """Returns the admissions of an earlier process of this worker, or `BusClosed` if the bus is closed.

        The bus also removes the earlier process's references to media items. So this call must come before any
        encoding.
        """
        try:
            timeout_s = CALL_TIMEOUT_S
            return await bus.reclaim(worker=self._rank, timeout_s=timeout_s)
        except BusClosed as closed:
            return closed

    async def _sample(self, loop: RolloutLoop | FeederLoop, reclaimed: list[Admission] | BusClosed) -> None:
        try:
            if isinstance(reclaimed, BusClosed):
                raise reclaimed
            await loop.run(reclaimed)
        except BusClosed as closed:  # sampling has ended, but the last evaluation may be pending
            self.set_state("running", str(closed))

    async def _evaluate(self, evaluator: Evaluator, metrics: EventWriter) -> None:
        """Runs the evaluations, and returns when the record of the last evaluation is in the run's files.

        A stop cancels pending evaluations, and the sampling that waits for them, because the weight versions of these
        evaluations may never be published.
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
        """Waits for the end of the last evaluation. Returns False if the deadline passes or the loop ends before."""
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
            max_failed_groups=4 * rollout.prompts_per_step if config.reward.max_failed < 1 else None,
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


def _close_at_end(parts: RolloutParts, closing: AsyncExitStack) -> None:
    """Makes ``closing`` close the rewards, then the judges, then the env workers, then the encoders."""
    if parts.encoders is not None:
        closing.callback(parts.encoders.close)
    closing.callback(parts.configured_env.close)
    closing.push_async_callback(parts.rewards.close_judges)
    closing.callback(parts.rewards.close)


def group_filter(spec: AlgorithmSpec, config: object, reward: RewardConfig) -> GroupFilter | None:
    """Returns the algorithm's filter of complete groups, or None if the algorithm trains on all groups."""
    drop_group = spec.drop_group
    if drop_group is None:
        return None
    parts = [part.label for part in reward_parts(reward)] if find_reward(reward.name).combine is not None else []
    return GroupFilter(lambda rewards, dropped_in_a_row: drop_group(rewards, dropped_in_a_row, config), parts=parts)


log = logging.getLogger(__name__)


async def open_evaluator(context: RunContext, parts: RolloutParts) -> Evaluator:
    """Returns the evaluator of the remaining versions.

    If an earlier process of this worker ended before it recorded an evaluation, the current version is also evaluated.
    """
    config = context.config
    planned = eval_versions(every=config.eval.every, start=context.start_step, total_steps=config.run.steps)
    recorded = parts.reached.version
    # With in_order no evaluation is missing, because a version waits for its evaluation. With run.keep_best the current
    # version cannot replace a missing version, because a metric belongs to the checkpoint of one version.
    if planned and not config.in_order and config.run.keep_best is None:
        recorded = await asyncio.to_thread(_newest_recorded, context)
    versions = versions_left(planned, reached=parts.reached.version, recorded=recorded)
    sets = eval_sets(config, parts.source) if versions else []
    prepared = await prepared_sets(config, sets, parts.prompts)
    return Evaluator(
        versions=versions,
        ask=lambda version: answer_sets(
            config,
            prepared,
            version=version,
            pool=parts.pool,
            prompts=parts.prompts,
            rewards=parts.rewards,
            env=parts.configured_env,
            media_folder=str(context.media_folder or ""),
        ),
        wait_version=parts.reached.wait,
        # An evaluation episode that waits for weights occupies an env worker or an agent. Training may need the env
        # worker, and the agent would idle.
        steps_ahead=0 if parts.configured_env.env.isolated or parts.configured_env.env.agent is not None else 1,
        in_order=config.in_order,
        record=parts.metrics.record,
        record_texts=parts.metrics.record_texts,
        first_look=_first_look(context) if versions else None,
        ends_run=None if config.run.keep_best is None else partial(_report, context),
    )


def _first_look(context: RunContext) -> AnswerStats | None:
    """Returns the `AnswerStats` of the first evaluation with enough correct answers, or None."""
    looks = (stats_of_rows(text.rows) for text in read_texts(context.run_dir, SKELETONS))
    return next((look for look in looks if look.right >= FEWEST_FIRST), None)


def _newest_recorded(context: RunContext) -> int:
    """Returns the newest version with a recorded evaluation, or -1."""
    return max((texts.step for texts in read_texts(context.run_dir, EVAL)), default=-1)


async def _report(context: RunContext, version: int, values: Mapping[str, float]) -> bool:
    """Reports an evaluation to the trainer, which keeps the best checkpoint. Returns whether the run ends now.

    If the trainer has exited, this function only logs a warning; the controller handles the exit.
    """
    trainer = await asyncio.to_thread(discover_worker, context, worker_name("actor", 0))
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return bool(await trainer.record_evaluation.remote(version, dict(values)))
    except (RayActorError, TimeoutError) as error:
        log.warning("the trainer did not get the evaluation of version %d: %s", version, error)
        return False

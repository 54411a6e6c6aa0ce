"""Builds the evaluator of a run, whose figures go to the metrics and, with run.keep_best, to the trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from ray.exceptions import RayActorError

from relax_core.contracts.bus import CALL_TIMEOUT_S
from relax_core.contracts.data import PromptSource
from relax_core.data.eval_sets import eval_sets
from relax_core.engines.engine_pool import EnginePool
from relax_core.observe.event_log import EVAL, EventWriter, read_texts
from relax_core.roles.discovery import discover_worker
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.rollout.versions_reached import VersionsReached
from relax_core.rollout.env_workers.run_env import RunEnv
from relax_core.rollout.evaluation.evaluator import Evaluator, eval_versions, versions_left
from relax_core.rollout.evaluation.played_sets import answer_sets, prepared_sets
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool

log = logging.getLogger(__name__)


async def open_evaluator(
    context: RunContext,
    source: PromptSource,
    reached: VersionsReached,
    metrics: EventWriter,
    *,
    pool: EnginePool,
    prompts: PromptMaker,
    rewards: RewardPool,
    run_env: RunEnv,
) -> Evaluator:
    """Returns the evaluator of the versions that are still to come.

    If this process replaces one that ended before an evaluation was recorded, the version reached is evaluated too.
    """
    config = context.config
    planned = eval_versions(every=config.eval.every, start=context.start_step, total_steps=config.run.steps)
    recorded = reached.version
    # With in_order the version waits for the evaluation. An evaluation for run.keep_best needs a checkpoint of its own.
    if planned and not config.in_order and config.run.keep_best is None:
        recorded = await asyncio.to_thread(_newest_recorded, context)
    versions = versions_left(planned, reached=reached.version, recorded=recorded)
    sets = eval_sets(config, source) if versions else []
    prepared = await prepared_sets(config, sets, prompts)
    return Evaluator(
        versions=versions,
        ask=lambda version: answer_sets(
            config,
            prepared,
            version=version,
            pool=pool,
            prompts=prompts,
            rewards=rewards,
            env=run_env,
            media_folder=str(context.media_folder or ""),
        ),
        wait_version=reached.wait,
        # Episodes that hold places in env workers while they wait for weights could take those that training needs,
        # and an agent would wait in vain.
        steps_ahead=0 if run_env.env.isolated or run_env.env.agent is not None else 1,
        in_order=config.in_order,
        record=metrics.record,
        record_texts=lambda version, rows: metrics.record_texts(EVAL, version, rows),
        ends_run=None if config.run.keep_best is None else partial(_report, context),
    )


def _newest_recorded(context: RunContext) -> int:
    """Returns the newest version with a recorded evaluation, or -1."""
    return max((texts.step for texts in read_texts(context.run_dir, EVAL)), default=-1)


async def _report(context: RunContext, version: int, values: Mapping[str, float]) -> bool:
    """Reports an evaluation to the trainer, which keeps the best checkpoint; returns True if the run ends with it.

    The controller detects a trainer that has exited.
    """
    trainer = await asyncio.to_thread(discover_worker, context, worker_name("actor", 0))
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return bool(await trainer.record_evaluation.remote(version, dict(values)))
    except (RayActorError, TimeoutError) as error:
        log.warning("the trainer did not get the evaluation of version %d: %s", version, error)
        return False

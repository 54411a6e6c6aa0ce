"""Evaluates a model or a checkpoint for `relax eval`, without training, on engines of its own."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from relax_core.cli.eval_engines import EvalEngine, eval_engines
from relax_core.cli.eval_media import EvalMedia, eval_media
from relax_core.cli.eval_report import ANSWERS_FILE, as_result, print_result, write_result
from relax_core.config.checks.modality_keys import media_kinds
from relax_core.config.own_runs import marked
from relax_core.config.saved import to_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import EngineError
from relax_core.contracts.host.output_path import new_private_folder
from relax_core.data.eval_sets import asks_held_out, eval_sets
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer, utc_date
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.observe.panel_view import ShownConsole
from relax_core.observe.summary import library_versions
from relax_core.registry import find_env, find_reward
from relax_core.rollout.env_workers.run_env import RunEnv
from relax_core.rollout.evaluation.evaluator import PreparedSet, SetAnswers
from relax_core.rollout.evaluation.played_sets import answer_sets, prepared_sets
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.tools.export import export
from relax_core.tools.make_tiny import tiny_model_folder

FAILED, USAGE = 1, 2
PRINT_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Names the weights to evaluate: those of ``checkpoint`` after ``step`` train steps, else the model's own."""

    checkpoint: Path | None = None
    step: int | None = None


def evaluate(config: RelaxConfig, target: Target) -> int:
    """Starts engines with the target's weights, asks every set, and writes the result into ``run.dir``.

    A ``run.dir`` that has files stays as it is: the result is in the next free folder, such as ``DIR-2``. Returns the
    exit code: 0 for success, 1 if an engine or a reward failed, 2 if the data or the checkpoint cannot be used. Errors
    are printed to stderr.
    """
    started, wanted = time.monotonic(), Path(config.run.dir)
    config.data.template_date = config.data.template_date or utc_date()
    try:
        folder = new_private_folder(wanted, key="run.dir")
        if folder != wanted:
            print(f"relax: {wanted} has files, so the result is written to {folder}", file=sys.stderr)
            config = replace(config, run=replace(config.run, dir=str(folder)))
        with (
            _weights(config, target, folder) as model,
            eval_media(config, model, log_dir=folder / "logs") as media,
            asyncio.Runner() as runner,  # one event loop, in which an encoding may outlive the call that began it
        ):
            prompts = prompt_maker(config, model, media)
            sets = runner.run(prepared(config, prompts))
            (folder / "config.yaml").write_text(marked(to_yaml(config)), encoding="utf-8")
            found = _ask(config, model, prompts, sets, runner=runner, media=media)
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    except (EngineError, RuntimeError) as error:
        print(f"relax: failed: {error}", file=sys.stderr)
        return FAILED
    meta = {
        "model": config.model.path or config.model.builtin,
        "checkpoint": None if target.checkpoint is None else str(target.checkpoint),
        "step": target.step,
        "engine": config.engine.name,
        "samples": config.eval.samples,
        "temperature": config.eval.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "stop": list(config.rollout.stop),
        "files": dict(config.eval.sets),
        "seconds": time.monotonic() - started,
        "versions": library_versions(),
    }
    result = as_result(found, meta=meta)
    path = write_result(folder, result, found)
    print_result(ShownConsole(), result)
    print(f"\nresult   {path}\nanswers  {folder / ANSWERS_FILE}")
    return 0


def prompt_maker(config: RelaxConfig, model: Path, media: EvalMedia | None) -> PromptMaker:
    """Returns what makes the prompts."""
    return PromptMaker(
        env=find_env(config.env.name),
        env_config=config.env,
        tokenizer=PromptTokenizer(
            model, template_arguments=config.data.chat_template_kwargs, date=config.data.template_date
        ),
        max_prompt_tokens=config.engine.context_tokens - config.rollout.max_new_tokens,
        overlong=config.data.overlong,
        last_assistant=config.data.last_assistant,
        items=None if media is None else media.items,
        prompt_items=config.modality.prompt_items,
        media_kinds=media_kinds(config),
    )


async def prepared(config: RelaxConfig, prompts: PromptMaker) -> list[PreparedSet]:
    """Prepares the prompts of every set. Raises ValueError for unusable data."""
    source = None
    if asks_held_out(config):
        source = make_source(config.data, seed=config.seed, eval_rows=config.eval.rows)
    return await prepared_sets(config, eval_sets(config, source), prompts)


@contextmanager
def _weights(config: RelaxConfig, target: Target, folder: Path) -> Iterator[Path]:
    """Yields a Hugging Face folder with the weights.

    A checkpoint's weights are written beside the result, and removed after the block.
    """
    if target.checkpoint is None:
        yield _model_folder(config)
        return
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=folder) as written:
        out = Path(written) / "hf"
        export(target.checkpoint, out, model=None, dtype=None, shard_gb=4.0, trust=True)  # checked by `rerun_line`
        yield out


def _model_folder(config: RelaxConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.builtin is not None and config.model.task is not None, "validated"
    return tiny_model_folder(config.model.builtin, task=config.model.task)


def _ask(
    config: RelaxConfig,
    model: Path,
    prompts: PromptMaker,
    sets: Sequence[PreparedSet],
    *,
    runner: asyncio.Runner,
    media: EvalMedia | None,
) -> list[SetAnswers]:
    media_folder = None if media is None else media.folder
    total = sum(len(one.rows) for one in sets)
    print(f"relax: {total} prompts x {config.eval.samples} answers; {config.engine.name} engines start", flush=True)
    reward, log_dir = find_reward(config.reward.name), Path(config.run.dir) / "logs"
    with (
        RewardPool(
            reward,
            config.reward,
            workers=config.rollout.reward_workers,
            concurrency=config.rollout.reward_concurrency,
            media_folder=str(media_folder or ""),
        ) as rewards,
        RunEnv(config, log_dir=log_dir) as env,
        eval_engines(config, model, log_dir=log_dir, media_folder=media_folder) as engines,
    ):
        asked = _ask_engines(config, engines, prompts, sets, rewards, env, total=total, media=media)
        return runner.run(asked)


async def _ask_engines(
    config: RelaxConfig,
    engines: Sequence[EvalEngine],
    prompts: PromptMaker,
    sets: Sequence[PreparedSet],
    rewards: RewardPool,
    env: RunEnv,
    *,
    total: int,
    media: EvalMedia | None,
) -> list[SetAnswers]:
    async def client_for(engine: int, on_policy: bool) -> EngineClient:
        return engines[engine].client()

    printed = time.monotonic()

    def print_progress(answered: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > PRINT_EVERY_S:
            printed = time.monotonic()
            print(f"relax: {answered} of {total} prompts are answered", flush=True)

    work = None if media is None else media.work
    pool = EnginePool(len(engines), client_for, timeout_s=config.engine.request_timeout_s, item_work=work)
    try:
        async with env.serving(prompts.tokenizer):
            return await answer_sets(
                config,
                sets,
                version=0,
                pool=pool,
                prompts=prompts,
                rewards=rewards,
                env=env,
                on_progress=print_progress,
                media_folder="" if media is None else str(media.folder),
            )
    finally:
        for engine in engines:
            await engine.aclose()

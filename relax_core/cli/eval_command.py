"""`relax eval MODEL|CHECKPOINT|RUN [key=value …]` starts engines and evaluates a model without training."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from relax_core.config.compose import Settle, run
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import CommandLine, hub_download_hint, is_hub_name
from relax_core.config.modality import media_kinds
from relax_core.config.options import COMMANDS, conf_folder, yaml_options
from relax_core.config.rerun import marked, rerun_line
from relax_core.config.saved_config import to_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.config.validate import Check
from relax_core.contracts.bus import CALL_TIMEOUT_S
from relax_core.contracts.engine import REQUEST_TIMEOUT_S, EngineError
from relax_core.contracts.media import MediaItem
from relax_core.contracts.output_path import new_private_folder
from relax_core.control.host.run_paths import run_paths
from relax_core.data.chat_template import utc_date
from relax_core.data.eval_sets import NAMED_ROWS, asks_held_out, eval_sets_alone
from relax_core.data.sources import unsplit_rows
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.families.folder import family_key
from relax_core.families.hf_config import has_hf_config, read_hf_config
from relax_core.observe.panel import ShownConsole
from relax_core.observe.summary import library_versions
from relax_core.plan.unused_keys import unread_by_evaluation
from relax_core.registry import find_env, find_reward
from relax_core.rollout.env_workers.configured_env import ConfiguredEnv
from relax_core.rollout.eval_metrics import Estimate, mean_reward, shadow_values
from relax_core.rollout.evaluator import PreparedSet, SetAnswers, answer_sets, prepared_sets
from relax_core.rollout.item_cache import CACHE_BYTES, HeldItems, ItemCache
from relax_core.rollout.media_encoding import item_work_of, open_encoders
from relax_core.rollout.prompt_tokens import PromptMaker, shown_prompt
from relax_core.rollout.rewards.reward_pool import REWARD_CALLS, RewardPool
from relax_core.tools.export import export
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.checkpoints.checkpoint_store import CONFIG, META, CheckpointStore, recover_replaced

USAGE = f"relax {COMMANDS['eval'][0]}"
_TIME_FOLDER = "${now:%Y-%m-%d_%H-%M-%S}"


def eval_command(words: Sequence[str], *, checks: Sequence[Check], settle: Settle) -> int:
    """Evaluates the model, checkpoint or run in the first argument. Returns the exit code of `evaluate`.

    The argument is a Hugging Face folder, an option of conf/model, a checkpoint, or a run. Of a run, the newest
    checkpoint is evaluated. For a checkpoint or a run, the saved settings are used, and ``key=value`` changes them.
    ``checks`` are additional checks of an evaluation's configuration. ``settle`` derives the values that are not set.
    """
    if "--help" in words or "-h" in words:
        print(f"{USAGE}: {COMMANDS['eval'][1]}")
        return 0
    if not words or words[0].startswith("-") or "=" in words[0].rpartition("/")[2]:
        print(f"relax: {USAGE}", file=sys.stderr)
        return 2
    if problems := list(unread_by_evaluation(words[1:])):
        print(ConfigError(problems).report(), file=sys.stderr)
        return 2
    try:
        target, line = _target(words[0], words[1:])
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return 2
    return run(line, partial(evaluate, target=target), checks=checks, settle=settle)


def _target(word: str, overrides: Sequence[str]) -> tuple[Target, CommandLine]:
    """Returns the target to evaluate, and its configuration as a command line.

    Raises ValueError for an unknown target.
    """
    folder = Path(word).expanduser().absolute()
    if (folder / META).is_file():
        return _checkpoint(folder, folder.parent.parent, overrides)
    if (folder / CONFIG).is_file() and (folder / "checkpoints").is_dir():
        recover_replaced(folder / "checkpoints")
        newest = CheckpointStore(folder / "checkpoints", keep_last=1).newest_valid(requirements=(CONFIG,))
        if newest is None:
            raise ValueError(f"{folder} has no checkpoint.")
        for left in newest.left:
            print(f"relax: {left}", file=sys.stderr)
        return _checkpoint(newest.folder, folder, overrides)
    if has_hf_config(folder):
        chosen = any(override.startswith("model=") for override in overrides)
        families = [word.partition("=")[2] for word in overrides if word.startswith("model.family=")]
        option = [] if chosen else [f"model={_option_for(folder, also=next(iter(families), None))}"]
        own = [_in_folder("evaluations/${name}"), *option, f"model.path={folder}"]
        return Target(), CommandLine.of([*own, *overrides])
    if word in yaml_options("model"):
        return Target(), CommandLine.of([_in_folder("evaluations/${name}"), f"model={word}", *overrides])
    if is_hub_name(word) and not folder.exists():
        raise ValueError(f"{word}: no such folder. A model of the hub: {hub_download_hint(word, then='relax eval ')}.")
    raise ValueError(
        f"{word}: neither a run's folder, a checkpoint, a Hugging Face folder, nor one of the models "
        f"{', '.join(yaml_options('model'))}. {USAGE}"
    )


def _checkpoint(checkpoint: Path, run_folder: Path, overrides: Sequence[str]) -> tuple[Target, CommandLine]:
    checkpoint = checkpoint.resolve()  # `best` is a link
    step = CheckpointStore.read_meta(checkpoint).step
    own = [_in_folder(str(run_folder / "evaluations" / f"step_{step}"))]
    if not any(override.startswith("launcher=") for override in overrides):
        own.append("launcher=local")  # replaces the run's launcher
    line = rerun_line([str(checkpoint), *own, *overrides])
    return Target(checkpoint=checkpoint, step=step), line


def _in_folder(folder: str) -> str:
    return f"run.dir={folder}/{_TIME_FOLDER}"


def _option_for(folder: Path, *, also: str | None) -> str:
    """Returns the option of conf/model for a folder of this model's family.

    ``also`` is the name or file of an additional family. Raises ValueError if no option fits.
    """
    family = read_hf_config(folder).get("model_type")
    for option in yaml_options("model"):
        values = yaml.safe_load((conf_folder() / "model" / f"{option}.yaml").read_text(encoding="utf-8"))
        if values.get("family") == family and values.get("builtin") is None:
            return option
    if family_key(family, also=also) is not None:
        return "folder"
    raise ValueError(f"{folder}: model_type={family!r} in its config.json belongs to no family that Relax knows.")


RESULT_FILE = "evaluation.json"
ANSWERS_FILE = "answers.jsonl"
HELD_OUT = "held-out rows"  # name shown for a set without a name
INTERVALS = (
    "95 %. Shares: Wilson (1927), with the effective number of cases from the spread between prompts (Kish 1965; Korn "
    "and Graubard 1998), at least one a prompt. Reward: normal, over the prompts' means. pass@k: Chen et al. (2021), "
    "equation 1. maj@k: mean over all draws of k answers; ties are broken at random."
)


def as_result(found: Sequence[SetAnswers], *, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of evaluation.json."""
    return {**meta, "intervals": INTERVALS, "sets": [_set(set_answers) for set_answers in found]}


def write_result(folder: Path, result: Mapping[str, Any], found: Sequence[SetAnswers]) -> Path:
    """Writes the result and all answers into ``folder``. Returns the path of the result."""
    with (folder / ANSWERS_FILE).open("w", encoding="utf-8") as file:
        for set_answers in found:
            for prompt, answers in zip(set_answers.of.rows, set_answers.answers, strict=True):
                line = {
                    "set": set_answers.of.name,
                    "prompt": shown_prompt(prompt.row["prompt"], [media.item for media in prompt.media])
                    if prompt.media
                    else prompt.row["prompt"],
                    "answer": str(prompt.row["answer"]),
                    "responses": [answer.text for answer in answers],
                    "exact": [answer.exact for answer in answers],
                    "rewards": [answer.reward for answer in answers],
                    "votes": [answer.vote for answer in answers],
                    "why": [answer.why for answer in answers],
                    "turns": [answer.turns if answer.ended else 0 for answer in answers],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    path = folder / RESULT_FILE
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Prints a table of all metrics with their intervals, and below the table remarks about each set."""
    table = Table(show_edge=False)
    for heading in ("set", "figure", "value", "from", "to"):
        table.add_column(heading, justify="left" if heading in ("set", "figure") else "right")
    for eval_set in result["sets"]:
        first = f"{eval_set['name'] or HELD_OUT}, {eval_set['rows']} prompts"
        for name, figure in eval_set["figures"].items():
            table.add_row(first, name, *(f"{figure[key]:.4f}" for key in ("value", "low", "high")))
            first = ""
    console.print(table)
    for eval_set in result["sets"]:
        for words in _remarks(eval_set):
            console.print(f"{eval_set['name'] or HELD_OUT}: {words}", soft_wrap=True)


def _remarks(eval_set: Mapping[str, Any]) -> list[str]:
    """Returns facts about a set that are not among its metrics."""
    words = [f"{eval_set['truncated']:.1%} of {eval_set['answers']} answers reached the token limit"]
    if eval_set["bad_rows"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in eval_set["bad_rows"].items())
        words.append(f"{sum(eval_set['bad_rows'].values())} data rows cannot be used and are left out ({reasons})")
    if eval_set["unscored"]:
        words.append(f"{eval_set['unscored']} answers have no reward and are counted as not exact")
    if "shadow" in eval_set:
        words.append(f"by reward.shadow {eval_set['shadow']:.4f} of the answers that it scored are right")
    return words


def _set(set_answers: SetAnswers) -> dict[str, Any]:
    answers = [answer for of_prompt in set_answers.answers for answer in of_prompt]
    metrics = _metrics(set_answers)
    for part, its in set_answers.by_part().items():
        metrics |= {f"{part}/{name}": figure for name, figure in _metrics(its).items()}
    return {
        "name": set_answers.of.name,
        "rows": len(set_answers.answers),
        "answers": len(answers),
        "figures": metrics,
        "truncated": fmean(answer.cut for answer in answers) if answers else 0.0,
        "response_tokens": fmean(answer.tokens for answer in answers) if answers else 0.0,
        "unscored": set_answers.unscored,
        "bad_rows": dict(Counter(error.reason for error in set_answers.of.bad)),
        "bad_rows_named": [str(error) for error in set_answers.of.bad[:NAMED_ROWS]],
        **shadow_values(set_answers.answers),
    }


def _metrics(set_answers: SetAnswers) -> dict[str, dict[str, float]]:
    metrics = {name: _as_dict(estimate) for name, estimate in set_answers.estimates().items()}
    reward = mean_reward(set_answers.answers)
    return metrics if reward is None else metrics | {"reward": _as_dict(reward)}


def _as_dict(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


@dataclass(frozen=True, kw_only=True)
class EvalMedia:
    """Holds the media of an evaluation.

    ``items`` is the cache of media items, and ``folder`` their folder in shared memory. ``work`` returns the amount of
    tower work for an item.
    """

    items: ItemCache
    folder: Path
    work: Callable[[MediaItem], float]


@contextmanager
def eval_media(config: RelaxConfig, model_folder: Path, *, log_dir: Path) -> Iterator[EvalMedia | None]:
    """Starts worker processes that encode media. Yields None for a text-only evaluation.

    After the block, ends the workers and removes the files. Raises ValueError if the model's folder lacks a processor
    file.
    """
    if not media_kinds(config):
        yield None
        return
    log_dir.mkdir(parents=True, exist_ok=True)
    with run_paths(run_dir=Path(config.run.dir)) as paths:
        folder = paths.weights_folder
        with open_encoders(config, model_folder=model_folder, media_folder=folder, log_dir=log_dir) as encoders:
            held = HeldItems(encoders, ItemFiles(folder), worker=0, timeout_s=CALL_TIMEOUT_S)
            items = ItemCache(held, max_bytes=CACHE_BYTES, release_items=held.release_items)
            yield EvalMedia(items=items, folder=folder, work=item_work_of(config, model_folder=model_folder))


class ItemFiles:
    """Replaces the bus for the item cache. The item cache alone decides when the files of items are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Returns the digests of the items without a file."""
        return [digest for digest in items if not (self._folder / digest).exists()]

    async def release_items(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Removes the files of items."""
        for digest in digests:
            await asyncio.to_thread((self._folder / digest).unlink, missing_ok=True)


STOP_S = 5.0


class EvalEngine:
    """Holds an engine process and its client."""

    def __init__(self, process: EngineProcess, client: EngineClient, *, log_file: Path) -> None:
        self._process = process
        self._client = client
        self._log_file = log_file

    def client(self) -> EngineClient:
        """Returns the client. Raises EngineError if the process has ended, because an evaluation restarts no engine."""
        code = self._process.poll()
        if code is not None:
            raise EngineError(f"an engine process ended with {code}; see {self._log_file}")
        return self._client

    async def aclose(self) -> None:
        """Closes the client's connections."""
        await self._client.aclose()
        self._client.close()


@contextmanager
def eval_engines(
    config: RelaxConfig, model_folder: Path, *, log_dir: Path, media_folder: Path | None = None
) -> Iterator[list[EvalEngine]]:
    """Starts ``engine.count`` engines in parallel and stops them after the block.

    ``media_folder`` has the media items of prompts, or is None for text. Raises EngineError if an engine does not
    start.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="rlx-eval-")))
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32), encoding="utf-8")
        port = config.engine.port
        launches = [
            EngineLaunch(
                model_folder=model_folder,
                family=config.model.family,
                engine=config.engine,
                dtype=config.engine.dtype or config.model.dtype,
                token_file=token_file,
                log_file=log_dir / f"engine-{number}.log",
                port=port + number if port else 0,
                load_weights=True,
                stop_strings=bool(config.rollout.stop),
                media_folder=media_folder,
                shard_media=config.parallel.shard_media,
            )
            for number in range(config.engine.count)
        ]
        with ThreadPoolExecutor(len(launches)) as threads:
            starts = [threads.submit(EngineProcess.start, launch) for launch in launches]
            for start in starts:
                if start.exception() is None:
                    undo.callback(start.result().stop, timeout_s=STOP_S)
        processes = [start.result() for start in starts]
        yield [
            EvalEngine(
                process,
                build_client(
                    config.engine,
                    process.url,
                    model_folder=model_folder,
                    token_file=token_file,
                    media_folder=media_folder,
                ),
                log_file=launch.log_file,
            )
            for process, launch in zip(processes, launches, strict=True)
        ]


FAILED, UNUSABLE = 1, 2
PRINT_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Holds the weights to evaluate.

    ``checkpoint`` is a checkpoint after ``step`` train steps. None selects the weights of the model folder.
    """

    checkpoint: Path | None = None
    step: int | None = None


def evaluate(config: RelaxConfig, target: Target) -> int:
    """Starts engines with the target's weights, evaluates all sets, and writes the result to ``run.dir``.

    If ``run.dir`` contains files, the result is written to the next free folder, such as ``DIR-2``. Returns the exit
    code: 0 for success, 1 if an engine or a reward failed, 2 if the data or the checkpoint cannot be used. Prints
    errors to stderr.
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
            asyncio.Runner() as runner,  # one event loop for all calls, because an encoding may outlive its call
        ):
            prompts = prompt_maker(config, model, media)
            sets = runner.run(prepared(config, prompts))
            (folder / "config.yaml").write_text(marked(to_yaml(config)), encoding="utf-8")
            found = _ask(config, model, prompts, sets, runner=runner, media=media)
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return UNUSABLE
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
    """Returns the object that makes prompts from data rows."""
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
        media_kinds=media_kinds(config),
    )


async def prepared(config: RelaxConfig, prompts: PromptMaker) -> list[PreparedSet]:
    """Prepares the prompts of every set. Raises ValueError for unusable data."""
    if asks_held_out(config) and (rows := unsplit_rows(config.data)) is not None:
        first = "all" if len(rows) <= config.eval.rows else f"the first eval.rows={config.eval.rows}"
        message = f"the data has {len(rows)} rows, too few to hold data.eval_size={config.data.eval_size} of them out"
        print(f"relax: {message}, so {first} of them are evaluated", flush=True)
    return await prepared_sets(config, eval_sets_alone(config), prompts)


@contextmanager
def _weights(config: RelaxConfig, target: Target, folder: Path) -> Iterator[Path]:
    """Yields a Hugging Face folder with the weights.

    Writes a checkpoint's weights next to the result, and removes them after the block.
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
    total = sum(len(eval_set.rows) for eval_set in sets)
    print(f"relax: {total} prompts x {config.eval.samples} answers; {config.engine.name} engines start", flush=True)
    reward, log_dir = find_reward(config.reward.name), Path(config.run.dir) / "logs"
    with (
        RewardPool(
            reward,
            config.reward,
            workers=config.rollout.reward_workers,
            concurrency=REWARD_CALLS,
            media_folder=str(media_folder or ""),
        ) as rewards,
        ConfiguredEnv(config, log_dir=log_dir) as env,
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
    env: ConfiguredEnv,
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
    pool = EnginePool(len(engines), client_for, timeout_s=REQUEST_TIMEOUT_S, item_work=work)
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

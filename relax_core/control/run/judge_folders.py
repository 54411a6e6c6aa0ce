"""Finds the model folders of a run's judges, and checks the judges before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from relax_core.config.model_checks import folder_problems
from relax_core.config.reward_choice import ChosenReward, judged_reward
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judge import JudgeConfig, JudgeSetup
from relax_core.data.sources import GENERATED_KEYS
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import MODEL_NAMES
from relax_core.registry import PluginError, find_engine
from relax_core.roles.process.role_context import JUDGE_ENGINE
from relax_core.rollout.judges.judge_choice import judge_engine, judge_engines, judge_plan, judge_positions
from relax_core.rollout.judges.judge_pool import KnownVerdict, known_verdicts
from relax_core.rollout.judges.judge_prompts import JudgePrompt, verdict_parser
from relax_core.tools.make_tiny import check_tiny_model, tiny_model_folder


def judge_folders(config: RelaxConfig) -> Mapping[str, Path]:
    """Returns name → folder of the judges that have engines of the run; a built-in model is made on first use."""
    plan = judge_plan(config)
    if plan is None:
        return {}
    return {name: _folder(config, judge) for name, judge in _own(plan.judges).items()}


def judge_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of judges that the reward's own check cannot find: files, models, engines, templates."""
    try:
        chosen = judged_reward(config.reward)
        if chosen is not None:
            chosen.spec.check(chosen.config)
    except ValueError:
        return  # config/ has reported it
    plan = judge_plan(config)
    if chosen is None or plan is None:
        return
    for name, setup in plan.judges.items():
        yield from _setup_problems(config, name, setup)
    own = _own(plan.judges)
    if config.placement.gpus_per_node and len(kinds := {judge.engine for judge in own.values()}) > 1:
        yield f"reward.judges have the engines {', '.join(sorted(kinds))}: with GPUs, judges have one kind of engine."
    asked = config.placement.roles.get(JUDGE_ENGINE)
    if asked is not None and asked != (engines := len(judge_engines(config))):
        yield f"placement.roles.{JUDGE_ENGINE}={asked}: judges have {engines} engines with a GPU each. Use {engines}."
    route = getattr(chosen.config, "route", None)
    if route is not None and config.data.task is not None and route not in GENERATED_KEYS:
        has = ", ".join(GENERATED_KEYS)
        yield f"reward.route={route}: data={config.data.name} has only {has}. Use data=file."
    if plan.check.path is not None:
        try:
            known = known_verdicts(plan.check.path)
        except ValueError as error:
            yield str(error)
            return
        yield from _row_problems(known, chosen)


def _row_problems(known: Sequence[KnownVerdict], chosen: ChosenReward) -> Iterator[str]:
    """Yields the first row of reward.check.path that the reward cannot score."""
    for one in known if chosen.spec.check_row is not None else ():
        try:
            chosen.spec.check_row(one.row, chosen.config)  # type: ignore[misc]
        except ValueError as error:
            yield f"{one.where}: {error}"
            return


def _setup_problems(config: RelaxConfig, name: str, setup: JudgeSetup) -> Iterator[str]:
    key, judge = f"reward.judges.{name}", setup.settings
    prompt = None
    try:
        prompt = JudgePrompt(setup)
    except ValueError as error:
        yield f"{key}.prompt: {error}"
    try:
        verdict_parser(setup.parse)
    except ValueError as error:
        yield f"{key}.parse: {error}"
    if judge.url is not None:
        if judge.token_file is not None and not Path(judge.token_file).is_file():
            yield f"{key}.token_file={judge.token_file}: no such file. Write the server's key into one."
        return
    try:
        find_engine(judge.engine)
    except PluginError as error:
        yield f"{key}.engine: {error}"
        return
    problems = list(_model_problems(config, judge, key=f"{key}.model"))
    yield from problems
    if not problems and prompt is not None and judge.model not in MODEL_NAMES:
        yield from _context_problems(config, judge, prompt, key=key)


def _model_problems(config: RelaxConfig, judge: JudgeConfig, *, key: str) -> Iterator[str]:
    if judge.model in MODEL_NAMES:
        task = config.model.task or config.data.task
        if task is None:
            yield f"{key}={judge.model}: the task of its warm start is not known. Set model.task, or give a folder."
            return
        try:
            check_tiny_model(judge.model, task=task)
        except ValueError as error:
            yield f"{key}={judge.model}: {error}"
        return
    folder = _path(judge)
    # What it says of engine.context_length is about the model that learns.
    if problems := [one for one in folder_problems(config, folder, key=key) if one.startswith(key)]:
        yield from problems
        return
    try:
        if not find_engine(judge.engine).on_gpus:  # Relax computes this model itself
            folder_architecture(folder)
        try_tokenizer(folder)
        PromptTokenizer(folder)
    except ValueError as error:
        yield f"{key}={folder}: {error}"


def _context_problems(config: RelaxConfig, judge: JudgeConfig, prompt: JudgePrompt, *, key: str) -> Iterator[str]:
    """Yields a context that cannot hold the shortest prompt of a judge with its answer."""
    folder = _path(judge)
    context = judge_engine(config.engine, judge, positions=judge_positions(folder)).context_tokens
    tokens = len(PromptTokenizer(folder).encode([{"role": "user", "content": prompt.fixed_text()}]))
    if tokens + judge.max_new_tokens > context:
        yield (
            f"{key}: its prompt template alone has {tokens} tokens, and with {key}.max_new_tokens="
            f"{judge.max_new_tokens} its context holds {context}, the smaller of the positions of {folder} and "
            f"engine.max_total_tokens={config.engine.max_total_tokens}. Shorten {key}.prompt, or use another model."
        )


def _own(judges: Mapping[str, JudgeSetup]) -> dict[str, JudgeConfig]:
    return {name: setup.settings for name, setup in judges.items() if setup.settings.url is None}


def _folder(config: RelaxConfig, judge: JudgeConfig) -> Path:
    if judge.model in MODEL_NAMES:
        task = config.model.task or config.data.task
        assert task is not None, "validated"
        return tiny_model_folder(judge.model, task=task)
    return _path(judge)


def _path(judge: JudgeConfig) -> Path:
    assert judge.model is not None, "the reward's own check has passed"
    return Path(judge.model).expanduser().absolute()

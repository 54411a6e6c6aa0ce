"""Finds the model folders of a run's student, teachers and judges, checks them, and makes built-in models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from relax_core.config.modality import media_kinds
from relax_core.config.model_checks import folder_problems, media_token_ids
from relax_core.config.reward_choice import ChosenReward, judged_reward
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judge import JudgeConfig, JudgeSetup
from relax_core.data.sources import GENERATED_KEYS
from relax_core.data.tokenizer import PromptTokenizer, token_difference
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import language_values, read_hf_config
from relax_core.families.tiny_configs import MODEL_NAMES
from relax_core.registry import PluginError, find_algorithm, find_engine
from relax_core.roles.role_context import JUDGE_ENGINE
from relax_core.rollout.judges.judge_choice import judge_engine, judge_engines, judge_plan, judge_positions
from relax_core.rollout.judges.judge_pool import KnownVerdict, known_verdicts
from relax_core.rollout.judges.judge_prompts import JudgePrompt, verdict_parser
from relax_core.tools.make_tiny import check_tiny_model, tiny_model_folder

Made = TypeVar("Made")


def teacher_folders(config: RelaxConfig, *, student: Path) -> dict[str, Path]:
    """Maps the teachers' names to their folders, in the order of the configuration; empty without teachers.

    ``student`` is the folder of the trained model. A built-in teacher is made on its first use, which takes seconds.
    Raises ValueError for a teacher that does not fit the student.
    """
    teachers = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teachers is None:
        return {}
    folders = {name: _teacher_folder(config, model) for name, model in teachers.models.items()}
    problems = [
        problem
        for name, folder in folders.items()
        for problem in _misfits(config, folder, student=student, key=_key(name), top_k=teachers.top_k)
    ]
    if problems:
        raise ValueError(" ".join(problems))
    return folders


def teacher_model_problems(config: RelaxConfig, name: str, model: str, *, top_k: int) -> Iterator[str]:
    """Yields the problems of a teacher that can be found before any model is made."""
    if model in MODEL_NAMES:
        if _task(config) is None:
            yield (
                f"{_key(name)}={model}: the task that it was trained on is not known. Set model.task, or give the "
                "teacher as a Hugging Face folder."
            )
        return
    folder = _absolute(model)
    problems = list(folder_problems(config, folder, key=_key(name)))
    if not problems and config.model.path is not None and (Path(config.model.path) / "tokenizer.json").is_file():
        problems = list(_misfits(config, folder, student=Path(config.model.path), key=_key(name), top_k=top_k))
    yield from problems


def _misfits(config: RelaxConfig, folder: Path, *, student: Path, key: str, top_k: int) -> Iterator[str]:
    """Yields the reasons why a teacher's log-probs cannot be used for the student's tokens."""
    try:
        teacher = folder_architecture(folder, also=config.model.family)
        try_tokenizer(folder, template=False)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if media_kinds(config):
        yield from _unlike_patches(teacher.vision, folder, student=student, key=key, family=config.model.family)
    if (difference := token_difference(student, folder)) is not None:
        yield (
            f"{key}={folder}: its token ids differ from those of the trained model, {student}: {difference}. "
            "A teacher must have the student's tokenizer."
        )
    media = [media_token_ids(model_folder) for model_folder in (student, folder)]
    if media[0] != media[1]:
        yield (
            f"{key}={folder}: its media tokens are {media[1]}, but the trained model has {media[0]}. All roles skip "
            "the same tokens, so a teacher needs the same media tokens in tokenizer.json and config.json."
        )
    sizes = [int(language_values(read_hf_config(model_folder))["vocab_size"]) for model_folder in (student, folder)]
    if top_k and sizes[0] != sizes[1]:
        yield (
            f"{key}={folder}: config.json has vocab_size {sizes[1]}, the trained model has {sizes[0]}. With "
            "algo.form=topk_... they must be equal; algo.form=pure accepts this teacher."
        )
    if top_k > min(sizes):
        yield f"algo.top_k={top_k}: the vocabulary has {min(sizes)} tokens. Use at most {min(sizes)}."


def _unlike_patches(
    tower: VisionTower | None, folder: Path, *, student: Path, key: str, family: str | None
) -> Iterator[str]:
    """Yields why a teacher's vision tower does not fit the student's. The rows of an item depend on the patch sizes."""
    if tower is None:
        yield (
            f"{key}={folder}: it reads text only, and prompts may have images or video. Choose a teacher with vision, "
            "or train only on text with modality=text."
        )
        return
    own = folder_architecture(student, also=family).vision
    assert own is not None, "a run with media has a multimodal model"
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        ours, theirs = getattr(own, name), getattr(tower, name)
        if ours != theirs:
            yield (
                f"{key}={folder}: its vision tower has {name}={theirs}, but the trained model has {ours}, so "
                "an image has other rows. Choose a teacher with the same patch sizes."
            )


def _teacher_folder(config: RelaxConfig, model: str) -> Path:
    task = _task(config)
    if model in MODEL_NAMES:
        assert task is not None, "validated"
        return tiny_model_folder(model, task=task)
    return _absolute(model)


def _absolute(model: str) -> Path:
    return Path(model).expanduser().absolute()


def _task(config: RelaxConfig) -> str | None:
    return config.model.task or config.data.task


def _key(name: str) -> str:
    return f"algo.teachers.{name}"


# -- Judges: model folders, and checks before the start ---------------------------------------------------------------


def judge_folders(config: RelaxConfig) -> dict[str, Path]:
    """Maps the judges with engines of the run to their model folders. A built-in model is made on its first use."""
    plan = judge_plan(config)
    if plan is None:
        return {}
    return {name: _judge_folder(config, judge) for name, judge in _own(plan.judges).items()}


def judge_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of judges that the reward's check cannot find: files, models, engines, templates."""
    try:
        chosen = judged_reward(config.reward)
        if chosen is not None:
            chosen.spec.check(chosen.config)
    except ValueError:
        return  # the checks of config/ have reported this problem
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
    for verdict in known if chosen.spec.check_row is not None else ():
        try:
            chosen.spec.check_row(verdict.row, chosen.config)  # type: ignore[misc]
        except ValueError as error:
            yield f"{verdict.where}: {error}"
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
            yield f"{key}.token_file={judge.token_file}: no such file. Write the server's key into this file."
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
    folder = _judge_path(judge)
    # The problem with engine.context_length is about the trained model.
    if problems := [problem for problem in folder_problems(config, folder, key=key) if problem.startswith(key)]:
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
    """Yields a problem if a judge's shortest prompt and its answer do not fit into the context."""
    folder = _judge_path(judge)
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


def _judge_folder(config: RelaxConfig, judge: JudgeConfig) -> Path:
    if judge.model in MODEL_NAMES:
        task = config.model.task or config.data.task
        assert task is not None, "validated"
        return tiny_model_folder(judge.model, task=task)
    return _judge_path(judge)


def _judge_path(judge: JudgeConfig) -> Path:
    assert judge.model is not None, "the reward's own check has passed"
    return Path(judge.model).expanduser().absolute()


def made_in_time(folder: Future[Made], config: RelaxConfig, *, what: str) -> Made:
    """Returns the thread's result. Raises TimeoutError with the cause after run.start_timeout_s."""
    limit_s = config.run.start_timeout_s
    try:
        return folder.result(timeout=limit_s)
    except TimeoutError as error:
        if folder.done():  # the thread's function raised this error
            raise
        raise TimeoutError(
            f"run.start_timeout_s={limit_s:g}: {what} is still being made. The result is kept: start the run "
            "again later, or raise run.start_timeout_s."
        ) from error


def _student_folder(config: RelaxConfig) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    assert config.model.builtin is not None and config.model.task is not None, "validated"
    return tiny_model_folder(config.model.builtin, task=config.model.task)


@dataclass(frozen=True, kw_only=True)
class ModelFolders:
    """Holds the folder of the trained model, and the folders of teachers and of judges with engines, by name."""

    student: Path
    teachers: dict[str, Path]
    judges: dict[str, Path]


def making_models(config: RelaxConfig, pool: ThreadPoolExecutor) -> Callable[[], ModelFolders]:
    """Starts to make the built-in models of a run in ``pool``. The returned function waits and returns the folders."""
    student = pool.submit(_student_folder, config)
    teachers = pool.submit(lambda: teacher_folders(config, student=student.result()))
    judges = pool.submit(judge_folders, config)

    def made() -> ModelFolders:
        return ModelFolders(
            student=made_in_time(student, config, what=f"the model {config.model.builtin}"),
            teachers=made_in_time(teachers, config, what="a builtin teacher"),
            judges=made_in_time(judges, config, what="a builtin judge"),
        )

    return made

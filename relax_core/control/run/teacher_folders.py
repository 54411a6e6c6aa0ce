"""Finds the model folders of a distillation's teachers, and checks that they fit the student."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_core.config.modality import media_kinds
from relax_core.config.model_checks import folder_problems, media_token_ids
from relax_core.config.schema import RelaxConfig
from relax_core.data.tokenizer import token_difference
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import language_values, read_hf_config
from relax_core.families.tiny_configs import MODEL_NAMES
from relax_core.registry import find_algorithm
from relax_core.tools.make_tiny import tiny_model_folder


def teacher_folders(config: RelaxConfig, *, student: Path) -> dict[str, Path]:
    """Returns name → folder, in the order of the configuration.

    It is empty for an algorithm without teachers. ``student`` is the folder of the model that learns. A built-in
    teacher is made on first use, which takes seconds. Raises ValueError for a teacher that does not fit the student.
    """
    teachers = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teachers is None:
        return {}
    folders = {name: _folder(config, model) for name, model in teachers.models.items()}
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
    folder = _path(model)
    problems = list(folder_problems(config, folder, key=_key(name)))
    if not problems and config.model.path is not None and (Path(config.model.path) / "tokenizer.json").is_file():
        problems = list(_misfits(config, folder, student=Path(config.model.path), key=_key(name), top_k=top_k))
    yield from problems


def _misfits(config: RelaxConfig, folder: Path, *, student: Path, key: str, top_k: int) -> Iterator[str]:
    """Yields the reasons why a teacher's log-probs do not apply to the student's tokens."""
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
            f"{key}={folder}: its token ids are not those of the model that learns, {student}: {difference}. A teacher "
            "must have the student's tokenizer."
        )
    media = [media_token_ids(one) for one in (student, folder)]
    if media[0] != media[1]:
        yield (
            f"{key}={folder}: its media tokens are {media[1]}, those of the model that learns are {media[0]}. All "
            "roles skip the same tokens, so a teacher must name the same ones in tokenizer.json and config.json."
        )
    sizes = [int(language_values(read_hf_config(one))["vocab_size"]) for one in (student, folder)]
    if top_k and sizes[0] != sizes[1]:
        yield (
            f"{key}={folder}: config.json has vocab_size {sizes[1]}, the model that learns has {sizes[0]}. With "
            "algo.form=topk_... they must be equal; algo.form=pure takes this teacher."
        )
    if top_k > min(sizes):
        yield f"algo.top_k={top_k}: the vocabulary has {min(sizes)} tokens. Use at most {min(sizes)}."


def _unlike_patches(
    tower: VisionTower | None, folder: Path, *, student: Path, key: str, family: str | None
) -> Iterator[str]:
    """Yields why a teacher cannot see what the student sees: an item's rows are made for the student's patches."""
    if tower is None:
        yield (
            f"{key}={folder}: it reads text only, and prompts may have images or video. Choose a teacher that sees, or "
            "train on text alone with modality=text."
        )
        return
    own = folder_architecture(student, also=family).vision
    assert own is not None, "a run with media has a model that sees"
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        ours, theirs = getattr(own, name), getattr(tower, name)
        if ours != theirs:
            yield (
                f"{key}={folder}: its vision tower has {name}={theirs}, that of the model that learns has {ours}, so "
                "an image has other rows. Choose a teacher whose tower cuts images alike."
            )


def _folder(config: RelaxConfig, model: str) -> Path:
    task = _task(config)
    if model in MODEL_NAMES:
        assert task is not None, "validated"
        return tiny_model_folder(model, task=task)
    return _path(model)


def _path(model: str) -> Path:
    return Path(model).expanduser().absolute()


def _task(config: RelaxConfig) -> str | None:
    return config.model.task or config.data.task


def _key(name: str) -> str:
    return f"algo.teachers.{name}"

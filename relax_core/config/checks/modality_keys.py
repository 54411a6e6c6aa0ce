"""Checks the keys of `modality` and of the data's images and videos against the model's family."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.checks.model_folder import family_of_run
from relax_core.config.choices import TEXT, LauncherKind
from relax_core.config.media_schema import SEE_TASKS
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.media import MediaKind

LIBRARIES = {"PIL": "Pillow", "av": "PyAV"}
INSTALL = "pip install 'relax-core[omni]'"


def media_kinds(config: RelaxConfig) -> tuple[MediaKind, ...]:
    """Returns the kinds of media that prompts of this run may have; none for a run on text.

    A family that cannot be found has none; the checks of the model report it.
    """
    family = None if config.modality.name == TEXT else family_of_run(config)
    return () if family is None or family.vision is None else family.vision.kinds


def modality_problems(config: RelaxConfig) -> Iterator[str]:
    """Returns one sentence for everything about images and videos that cannot work."""
    yield from _limits(config)
    kinds = media_kinds(config)
    why = (
        f"modality={TEXT} reads none" if config.modality.name == TEXT else f"model={config.model.name} reads text only"
    )
    for kind, column in config.data.media_keys.columns.items():
        if kind not in kinds:
            told = f"data.media_keys.{kind}={column}: {why}."
            yield f"{told} Choose a model that sees, e.g. model=qwen3_vl, with modality=auto; or drop the key."
    if config.data.task in SEE_TASKS and not kinds:
        told = f"data.task={config.data.task} has images and videos: {why}."
        yield f"{told} Choose model=tiny_qwen3_vl with modality=auto."
    root = config.data.media_root
    if root is not None and kinds and config.launcher.name is not LauncherKind.ray_job and not Path(root).is_dir():
        yield f"data.media_root={root}: no such folder. Mount it, or drop the key to use the data file's folder."
    missing = [words for module, words in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if kinds and missing:
        yield (
            f"model={config.model.name} with modality={config.modality.name}: {' and '.join(missing)} not installed. "
            f"Run {INSTALL}, or train it on text with modality={TEXT}."
        )


def _limits(config: RelaxConfig) -> Iterator[str]:
    modality, context = config.modality, config.engine.context_length
    context = context if media_kinds(config) else None
    for key in ("image_tokens", "video_frames"):
        value = list(getattr(modality, key))
        if len(value) != 2 or not 1 <= value[0] <= value[1]:
            yield f"modality.{key}={value}: give the least and the most, e.g. modality.{key}=[4,64]."
        elif key == "image_tokens" and context is not None and value[0] >= context:
            yield (  # the check of the data tells of rows whose own images are too large
                f"modality.image_tokens={value} with engine.context_length={context}: no image fits into the context. "
                f"Use a least number far below {context}, e.g. modality.image_tokens=[4,{max(4, context // 2)}], or "
                "raise engine.context_length."
            )

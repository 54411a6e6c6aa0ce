"""Checks the keys of `modality` and media columns, and orders prompts by the shares of modalities (data.mix)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

from relax_core.config.choices import TEXT, LauncherKind
from relax_core.config.model_checks import family_of_run
from relax_core.config.schema import FOUR_MODALITIES, MEDIA_TASKS, TONE_OF_PICTURE, RelaxConfig
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.media import MEDIA_KINDS, MediaError, MediaKind
from relax_core.registry import find_engine

MIN_SHARE = 0.001
LONGEST_BLOCK = 1000  # prompts; the shares are exact to 0.001


def modality_of(kinds: Iterable[MediaKind]) -> str:
    """Returns the modality of a prompt with media of these kinds: "text", "video", "image_audio", ….

    A name with several kinds has the order of `MEDIA_KINDS`.
    """
    there = set(kinds)
    return "_".join(kind for kind in MEDIA_KINDS if kind in there) or TEXT


MODALITIES = (TEXT, *(modality_of(some) for count in (1, 2, 3) for some in combinations(MEDIA_KINDS, count)))


def kinds_of(modality: str) -> tuple[MediaKind, ...]:
    """Returns the kinds of media in prompts of this modality; empty for text."""
    return tuple(kind for kind in MEDIA_KINDS if kind in modality.split("_"))


def modality_of_row(row: DataRow | BadRow) -> str:
    """Returns the modality of a data row; for a bad row, the kind of its bad media item, or text."""
    if isinstance(row, BadRow):
        return row.kind if isinstance(row, MediaError) else TEXT
    prompt = row["prompt"]
    contents = [] if isinstance(prompt, str) else [message["content"] for message in prompt]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return modality_of(part["type"] for part in parts)


def mix_problem(mix: Any) -> str | None:
    """Returns the problem (key, value, fix) of a value of data.mix, or None."""
    setting, example = f"data.mix={mix}", "Give shares such as data.mix={video: 0.25, text: 0.75}, or null."
    if not isinstance(mix, dict) or not mix or any(type(share) not in (int, float) for share in mix.values()):
        return f"{setting} is not a mapping from modalities to numbers. {example}"
    for name in mix:
        if name not in MODALITIES:
            return f"{setting}: {name} is not a modality. Use some of: {', '.join(MODALITIES)}."
    if not min(mix.values()) >= MIN_SHARE or not abs(sum(mix.values()) - 1.0) <= 1e-9:
        total = sum(mix.values())
        return f"{setting}: the shares sum to {total:g}. They are at least {MIN_SHARE:g} each and sum to 1. {example}"
    return None


class MixOrder:
    """Assigns a modality to each index of an endless prompt sequence, in fixed ``shares`` that sum to 1.

    The sequence has blocks of equal length, at most `LONGEST_BLOCK`. In a block each index gets the modality that is
    furthest below its share. In most cases the prompts of any range of indices deviate from the shares by less than one
    prompt per modality. The sequence depends only on the shares, so all processes compute the same modality for an
    index.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.names = tuple(sorted(shares))
        exact = {name: Fraction(str(shares[name])) for name in self.names}
        self._length = min(LONGEST_BLOCK, math.lcm(*(share.denominator for share in exact.values())))
        self._owners: list[str] = []
        # for each index of a block, the number of earlier indices with the modality
        self._before: dict[str, list[int]] = {name: [0] for name in self.names}
        self._places: dict[str, list[int]] = {name: [] for name in self.names}
        for place in range(self._length):
            owner = max(self.names, key=lambda name: exact[name] * (place + 1) - len(self._places[name]))
            self._owners.append(owner)
            self._places[owner].append(place)
            for name in self.names:
                self._before[name].append(len(self._places[name]))

    def at(self, index: int) -> tuple[str, int]:
        """Returns the modality at this index, and the number of earlier indices with the same modality."""
        block, place = divmod(index, self._length)
        owner = self._owners[place]
        return owner, block * len(self._places[owner]) + self._before[owner][place]

    def index(self, modality: str, number: int) -> int:
        """Returns the index of prompt ``number`` of a modality, counted from 0."""
        block, own = divmod(number, len(self._places[modality]))
        return block * self._length + self._places[modality][own]

    def count(self, modality: str, places: int) -> int:
        """Returns how many of the first ``places`` indices have the modality."""
        block, place = divmod(places, self._length)
        return block * len(self._places[modality]) + self._before[modality][place]


LIBRARIES = {"PIL": "Pillow", "av": "PyAV"}
SOUND_LIBRARIES = {"soundfile": "soundfile", "soxr": "soxr"}
INSTALL = "pip install 'relax-core[omni]'"
LONGEST_SOUND_S = 600.0
_VISION_MODEL, _OMNI_MODEL = "sees, e.g. model=qwen3_vl", "hears, e.g. model=qwen3_omni"
MODELS_THAT: dict[MediaKind, str] = {"image": _VISION_MODEL, "video": _VISION_MODEL, "audio": _OMNI_MODEL}
_PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "sounds"}


def media_kinds(config: RelaxConfig) -> tuple[MediaKind, ...]:
    """Returns the kinds of media that prompts of this run may have; empty for a run on text.

    The result is also empty for an unknown family; the model check reports the family.
    """
    family = None if config.modality.name == TEXT else family_of_run(config)
    return () if family is None else family.media_kinds


def modality_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of media settings."""
    yield from _limits(config)
    kinds, task = media_kinds(config), config.data.task
    reads = _listed(kinds) or "text only"
    why = f"modality={TEXT} reads none" if config.modality.name == TEXT else f"model={config.model.name} reads {reads}"
    for kind, column in config.data.media_keys.columns.items():
        if kind not in kinds:
            message = f"data.media_keys.{kind}={column}: {why}."
            yield f"{message} Choose a model that {MODELS_THAT[kind]}, with modality=auto; or drop the key."
    if config.data.media_place is not None and not config.data.media_keys.columns:
        message = f"data.media_place={config.data.media_place.value}: no column has media."
        yield f"{message} Name it, such as data.media_keys.image=images; or drop data.media_place."
    if task in MEDIA_TASKS and not set(MEDIA_TASKS[task].kinds) <= set(kinds):
        builtin = "tiny_qwen3_omni" if "audio" in MEDIA_TASKS[task].kinds else "tiny_qwen3_vl"
        message = f"data.task={task} has {_listed(MEDIA_TASKS[task].kinds)}: {why}."
        yield f"{message} Choose model={builtin} with modality=auto."
    else:
        yield from _warm_start_problems(config)
    yield from _mix_problems(config, kinds, why)
    yield from _engine_problems(config, kinds)
    if config.modality.audio_in_video and config.modality.name != TEXT and not {"video", "audio"} <= set(kinds):
        yield f"modality.audio_in_video=true: {why}. Choose a model with vision and audio, or audio_in_video=false."
    root = config.data.media_root
    if root is not None and kinds and config.launcher.name is not LauncherKind.ray_job and not Path(root).is_dir():
        yield f"data.media_root={root}: no such folder. Mount it, or drop the key to use the data file's folder."
    needed = LIBRARIES | (SOUND_LIBRARIES if "audio" in kinds else {})
    missing = [words for module, words in needed.items() if importlib.util.find_spec(module) is None]
    if kinds and missing:
        yield (
            f"model={config.model.name} with modality={config.modality.name}: {' and '.join(missing)} not installed. "
            f"Run {INSTALL}, or train it on text with modality={TEXT}."
        )


def _warm_start_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem if a builtin model's warm start does not teach the answers of the data's task.

    Only the warm start for `TONE_OF_PICTURE` teaches the answers of that task (yes or no), and it teaches no other
    answers.
    """
    made, task = config.model.task, config.data.task
    if config.model.builtin is None or made is None or task is None:
        return
    if task.startswith(TONE_OF_PICTURE) and made != TONE_OF_PICTURE:
        yield (
            f"data.task={task} with model.task={made}: a model with that warm start never answers yes or no. "
            f"Use model.task={TONE_OF_PICTURE}."
        )
    if made == TONE_OF_PICTURE and not task.startswith(TONE_OF_PICTURE):
        yield (
            f"model.task={made} with data.task={task}: a model with that warm start answers only yes or no. "
            f"Use data.task={TONE_OF_PICTURE}, or another model.task, e.g. model.task={FOUR_MODALITIES}."
        )


def _mix_problems(config: RelaxConfig, kinds: Sequence[MediaKind], why: str) -> Iterator[str]:
    """Yields the problems of data.mix that can be found without reading the data."""
    if config.data.mix is None:
        return
    message = f"data.mix={config.data.mix}"
    if problem := mix_problem(config.data.mix):
        yield problem
        return
    for name in config.data.mix:
        if not set(kinds_of(name)) <= set(kinds):
            yield f"{message}: {why}, so no prompt has modality {name}. Choose a model that reads it, or drop data.mix."
    if config.data.media_place is not None:
        yield f"{message} with data.media_place: the shares count placeholders in prompts. Drop one of the two."
    if isinstance(config.data.paths, dict):
        yield (
            f"{message} with weights in data.paths={config.data.paths}: only one of the two can set how often a row "
            "is used. Use data.paths=[…] without weights, or data.mix=null."
        )


def _engine_problems(config: RelaxConfig, kinds: Sequence[MediaKind]) -> Iterator[str]:
    """Yields a problem for each kind of media that data and model have but the engine does not accept."""
    taken = find_engine(config.engine.name).media
    task = MEDIA_TASKS.get(config.data.task or "")
    asked = {kind: f"data.media_keys.{kind}={column}" for kind, column in config.data.media_keys.columns.items()}
    asked |= {} if task is None else dict.fromkeys(task.kinds, f"data.task={config.data.task}")
    for kind, key in asked.items():
        if kind in kinds and kind not in taken:
            takes = _listed(sorted(taken)) or "text only"
            yield f"{key} with engine={config.engine.name}: it takes {takes}. Use another engine, or other data."


def _listed(kinds: Sequence[MediaKind]) -> str:
    words = [_PLURALS[kind] for kind in kinds]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _limits(config: RelaxConfig) -> Iterator[str]:
    modality, context = config.modality, config.engine.context_length
    context = context if media_kinds(config) else None
    seconds = list(modality.audio_seconds)
    if len(seconds) != 2 or not 0.1 <= seconds[0] <= seconds[1] <= LONGEST_SOUND_S:
        yield (
            f"modality.audio_seconds={seconds}: give the minimum and the maximum, from 0.1 to {LONGEST_SOUND_S:g}, "
            "e.g. modality.audio_seconds=[0.1,30]."
        )
    for key in ("image_tokens", "video_frames"):
        value = list(getattr(modality, key))
        if len(value) != 2 or not 1 <= value[0] <= value[1]:
            yield f"modality.{key}={value}: give the minimum and the maximum, e.g. modality.{key}=[4,64]."
        elif key == "image_tokens" and context is not None and value[0] >= context:
            yield (  # the data check reports rows with too large images
                f"modality.image_tokens={value} with engine.context_length={context}: no image fits into the context. "
                f"Use a minimum far below {context}, e.g. modality.image_tokens=[4,{max(4, context // 2)}], or "
                "raise engine.context_length."
            )

"""Makes the prompts of a run before its start from the tokenizer, a prompt's limit and the headers of media."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.config.modality import media_kinds
from relax_core.config.model_checks import folder_problems
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.generated import MEDIA_ROWS
from relax_core.data.tokenizer import PromptTokenizer, vocabulary_problem
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.data.turn_tokens import unstopped_end
from relax_core.families.architecture import AudioSettings, PatchSettings
from relax_core.families.audio_tower import EXTRACTOR_FILE, audio_tower_of
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import inner_config, language_values, read_hf_config
from relax_core.families.tiny_configs import (
    MAX_POSITIONS,
    MODEL_NAMES,
    OMNI,
    TOOLS,
    VISION_NAMES,
    processor_files,
    tiny_config,
    tiny_omni_files,
)
from relax_core.families.vision_tower import IMAGE_FILE, VIDEO_FILE, tower_of
from relax_core.plan.model_dimensions import shape_dimensions
from relax_core.registry import find_env, find_family
from relax_core.rollout.episodes.tool_use import ToolUse
from relax_core.rollout.media_encoding import media_limits, media_root
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.tools.tiny_text import tiny_prompt_tokenizer

if TYPE_CHECKING:
    from relax_core.data.media.media_headers import PlannedItem

FRAMES_A_STEP = 2  # frames per time step of a video in Qwen3-VL
HEADERS = 2048  # number of media sources to read headers from before a start
ROWS_A_SECOND = 13  # rows per second of a sound in Qwen3-Omni
STAMP_TOKENS = 16  # maximum tokens of a step's time stamp, with the tokens that begin and end vision


def prompt_maker(config: RelaxConfig, *, headers: ItemHeaders | None = None) -> PromptMaker | None:
    """Returns a function that makes prompts from data rows, or None if there is no usable model yet.

    The result is also None for agents and for environments with turns, because these episodes make their own prompts.
    ``headers`` caches the headers of media. Raises ValueError with the key if the tokenizer or the chat template cannot
    be used, for example if the template leaves out the environment's tools.
    """
    tokenizer = run_tokenizer(config)
    env = find_env(config.env.name)
    if tokenizer is None:
        return None
    if env.agent is not None:  # An agent's requests determine its tools.
        return None
    if env.has_turns:
        ToolUse.of_env(env, config.env, tokenizer)
        return None
    headers = headers or ItemHeaders(config)
    headers.tokenize = tokenizer.encode_plain
    return PromptMaker(
        env=env,
        env_config=config.env,
        tokenizer=tokenizer,
        max_prompt_tokens=prompt_room(config),
        overlong=config.data.overlong,
        last_assistant=config.data.last_assistant,
        item_rows=headers.rows,
        media_kinds=media_kinds(config),
    )


def most_rows(config: RelaxConfig, kind: MediaKind) -> int:
    """Returns the maximum number of rows of a media item under the limits of `modality`."""
    if config.data.task in MEDIA_ROWS:
        return MEDIA_ROWS[config.data.task]
    modality = config.modality
    if kind == "image":
        return modality.image_tokens[1]
    heard = math.ceil(modality.audio_seconds[1] * ROWS_A_SECOND) + 1
    if kind == "audio":
        return heard
    seen = -(-modality.video_frames[1] // FRAMES_A_STEP) * (modality.frame_tokens + STAMP_TOKENS)
    return seen + heard + 2 if modality.audio_in_video else seen


class ItemHeaders:
    """Reads the headers of media sources and plans their items.

    Only the first `HEADERS` sources are read. A later source is assumed to have as many rows as the largest of them.
    Without a model's files, the limits of `modality` determine the rows. ``tokenize`` returns the ids of a time stamp.
    """

    tokenize: Callable[[str], Sequence[int]] | None = None

    def __init__(self, config: RelaxConfig) -> None:
        self._config = config
        self._tower: PatchSettings | None = None
        self._audio: AudioSettings | None = None
        self._items: dict[str, PlannedItem | MediaError] = {}
        self._most: dict[MediaKind, int] = {}
        if media_kinds(config):
            self._tower, self._audio = _towers(config)

    def rows(self, source: MediaSource) -> int:
        """Returns the number of rows of a source, or an estimate if the header is not read.

        Raises `MediaError` if the header shows that the source cannot be used.
        """
        if self._tower is None or self._config.data.task in MEDIA_ROWS:
            return most_rows(self._config, source.kind)
        if _key(source) not in self._items and len(self._items) >= HEADERS:
            return self._most.get(source.kind, most_rows(self._config, source.kind))
        item = self._read(source, self._tower)
        if isinstance(item, MediaError):
            raise item
        self._most[source.kind] = max(item.rows, self._most.get(source.kind, 1))
        return item.rows

    def item(self, source: MediaSource) -> PlannedItem | None:
        """Returns the planned item of a source, or None if the source cannot be used or the model has no files yet."""
        item = None if self._tower is None else self._read(source, self._tower)
        return None if isinstance(item, MediaError) else item

    def _read(self, source: MediaSource, tower: PatchSettings) -> PlannedItem | MediaError:
        from relax_core.data.media.media_headers import planned_item, read_media_header

        key = _key(source)
        if key not in self._items:
            limits = media_limits(self._config.modality)
            try:
                header = read_media_header(
                    source,
                    limits,
                    root=media_root(self._config),
                    audio_in_video=self._config.modality.audio_in_video,
                )
                self._items[key] = planned_item(header, tower, limits, audio=self._audio, tokenize=self.tokenize)
            except MediaError as error:
                self._items[key] = error
        return self._items[key]


def _key(source: MediaSource) -> str:
    return source.path or str(hash(source.data))


def _towers(config: RelaxConfig) -> tuple[PatchSettings | None, AudioSettings | None]:
    """Returns the settings for vision and audio; one is None if the model has no files yet or lacks this input."""
    try:
        if config.model.path is not None:
            model = folder_architecture(Path(config.model.path), also=config.model.family)
            return model.vision, model.audio
        hears = config.model.builtin == OMNI
        if not hears and config.model.builtin not in VISION_NAMES:
            return None, None
        hf_config = tiny_config(str(config.model.builtin))
        files = tiny_omni_files() if hears else processor_files()
        family, inner = find_family(hf_config["model_type"]), inner_config(hf_config)
        assert family.vision is not None, "these builtin models have vision input"
        seen = tower_of(family.vision, inner, image=files[IMAGE_FILE], video=files[VIDEO_FILE])
        extractor = files[EXTRACTOR_FILE]
        return seen, None if family.audio is None else audio_tower_of(family.audio, inner, extractor=extractor)
    except (ValueError, OSError):  # the model check reports it
        return None, None


def prompt_room(config: RelaxConfig) -> int:
    """Returns the largest number of tokens of a prompt.

    This is the context length minus the response. If the context is not derived yet, the model's number of positions
    replaces the context length. If both are unknown, the result is unbounded.
    """
    context = config.engine.context_length if config.engine.context_length is not None else positions(config)
    return sys.maxsize if context is None else context - config.rollout.max_new_tokens


def positions(config: RelaxConfig) -> int | None:
    """Returns the model's number of positions, or None if it is unknown or another check refuses the model."""
    model = config.model
    if model.builtin is not None:
        return MAX_POSITIONS
    try:
        if model.path is not None:
            longest = language_values(read_hf_config(Path(model.path))).get("max_position_embeddings")
            return longest if isinstance(longest, int) else None
        return shape_dimensions(model.shape).positions if model.shape is not None else None
    except (ValueError, OSError):
        return None


def stop_token_warnings(config: RelaxConfig) -> Iterator[str]:
    """Yields a warning if model.path's chat template ends an answer with neither a stop token nor a stop string."""
    try:
        tokenizer = None if config.model.path is None else run_tokenizer(config)
    except ValueError:  # the model check reports it
        return
    behind = "" if tokenizer is None else unstopped_end(tokenizer, config.rollout.stop)
    if tokenizer is None or not behind.strip():
        return
    names = ", ".join(map(tokenizer.token_text, tokenizer.stop_token_ids))
    end = next((token_id for token_id in tokenizer.encode_text(behind) if tokenizer.is_special(token_id)), None)
    fix = f"Set rollout.stop to a text in {behind.strip()!r}"
    if end is not None:
        text, ids = tokenizer.token_text(end), [*tokenizer.stop_token_ids, end]
        fix = f'Write "eos_token_id": {ids} into generation_config.json, which adds {text}'
    yield (
        f"model.path={config.model.path}: its chat template ends an answer without a stop token of the folder "
        f"({names}), so every answer may have rollout.max_new_tokens tokens. {fix}."
    )


def run_tokenizer(config: RelaxConfig) -> PromptTokenizer | None:
    """Returns the tokenizer of the model, or None if there is no usable model yet.

    Raises ValueError with the key if the folder's tokenizer or chat template cannot be used.
    """
    model, arguments = config.model, config.data.chat_template_kwargs
    if model.path is None:
        if model.builtin not in MODEL_NAMES:
            return None
        hears = model.builtin == OMNI
        sees = hears or model.builtin in VISION_NAMES
        calls = model.builtin == TOOLS
        return tiny_prompt_tokenizer(template_arguments=arguments, vision=sees, audio=hears, tools=calls)
    folder = Path(model.path)
    if model.builtin is not None or any(folder_problems(config, folder, key="model.path")):
        return None
    try:
        try_tokenizer(folder, arguments=arguments)
        tokenizer = PromptTokenizer(folder, template_arguments=arguments, date=config.data.template_date)
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from error
    if problem := vocabulary_problem(folder, tokenizer):
        raise ValueError(problem)
    return tokenizer

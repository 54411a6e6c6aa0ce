"""Makes the prompts of a run before it runs, with its tokenizer and the room that a prompt has in the context."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_core.config.checks.model_folder import folder_problems
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.media import MediaKind
from relax_core.data.generated import MEDIA_ROWS
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.hf_config import language_values, read_hf_config
from relax_core.families.tiny_configs import MAX_POSITIONS, MODEL_NAMES, VISION_NAMES
from relax_core.plan.model.model_source import shape_dimensions
from relax_core.registry import find_env
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.tools.tiny_tokenizer import tiny_prompt_tokenizer

FRAMES_A_STEP = 2  # frames that become one step of a video in Qwen3-VL
STAMP_TOKENS = 16  # tokens of a step's time stamp, with the tokens that begin and end vision, at most


def prompt_maker(config: RelaxConfig) -> PromptMaker | None:
    """Returns a function from a data row to its prompt, or None if there is no usable model yet.

    The result is also None for an environment with turns, whose episodes make their own prompts. Raises ValueError with
    the key for a tokenizer or a chat template that cannot be used.
    """
    tokenizer = _tokenizer(config)
    env = find_env(config.env.name)
    if tokenizer is None or env.has_turns:
        return None
    return PromptMaker(
        env=env,
        env_config=config.env,
        tokenizer=tokenizer,
        max_prompt_tokens=prompt_room(config),
        overlong=config.data.overlong,
        item_rows=lambda source: most_rows(config, source.kind),
    )


def most_rows(config: RelaxConfig, kind: MediaKind) -> int:
    """Returns how many rows an image or a video has at most, by the limits of `modality`."""
    if config.data.task in MEDIA_ROWS:
        return MEDIA_ROWS[config.data.task]
    modality = config.modality
    if kind == "image":
        return modality.image_tokens[1]
    return -(-modality.video_frames[1] // FRAMES_A_STEP) * (modality.frame_tokens + STAMP_TOKENS)


def prompt_room(config: RelaxConfig) -> int:
    """Returns the largest number of tokens of a prompt.

    It is what the context leaves beside the response, or what the model's positions leave if the context is not derived
    yet, and unbounded if these are unknown.
    """
    context = config.engine.context_length if config.engine.context_length is not None else positions(config)
    return sys.maxsize if context is None else context - config.rollout.max_new_tokens


def positions(config: RelaxConfig) -> int | None:
    """Returns the most tokens that the model takes, or None if unknown or if another check refuses it."""
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


def _tokenizer(config: RelaxConfig) -> PromptTokenizer | None:
    model, arguments = config.model, config.data.chat_template_kwargs
    if model.path is None:
        if model.builtin not in MODEL_NAMES:
            return None
        return tiny_prompt_tokenizer(template_arguments=arguments, vision=model.builtin in VISION_NAMES)
    folder = Path(model.path)
    if model.builtin is not None or any(folder_problems(config, folder, key="model.path")):
        return None
    try:
        return PromptTokenizer(folder, template_arguments=arguments)
    except ValueError as error:
        raise ValueError(f"model.path: {error}") from error

"""Makes the inputs of a rehearsed rank without a model folder and data: a config.json, and the largest micro-batch.

The micro-batch is the micro-batch of the plan for the whole model (`relax_core.plan.workload`). It is not made by the
trainer's own batcher: in a model with few layers the towers would weigh more, and it would batch other rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.config.engine_checks import offline_rows
from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree, Turn
from relax_core.families.architecture import Architecture
from relax_core.families.hf_config import CONFIG_FILE
from relax_core.families.tiny_configs import tiny_config
from relax_core.families.vision_tower import image_rows
from relax_core.plan.memory_terms import patches_of_micro_batch
from relax_core.plan.model_dimensions import SHAPES
from relax_core.plan.workload import Workload
from relax_core.registry import find_algorithm

# Keys of a model folder that relax_core/plan/shapes lacks. Their values change no count.
_TOKENS = ("image", "video", "audio", "vision_start", "vision_end", "audio_start", "audio_end")
_FIRST_TOKEN = 100
_AUDIO = {"n_window": 50, "n_window_infer": 800, "conv_chunksize": 500}
_PIXELS = {"size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SOUND = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "n_fft": 400,
    "hop_length": 160,
    "dither": 0.0,
}
_PROCESSORS = {"preprocessor_config.json": _PIXELS | _SOUND, "video_preprocessor_config.json": _PIXELS}
_INNER = ("text_config", "thinker_config")


def write_short_model(config: RelaxConfig, folder: Path, *, layers: int) -> None:
    """Writes the config.json of the run's model with its first ``layers`` layers to ``folder``, and no weights."""
    model = config.model
    if model.path is not None:
        for file in Path(model.path).glob("*.json"):
            shutil.copyfile(file, folder / file.name)
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    elif model.builtin is not None:
        values = tiny_config(model.builtin)
    else:
        values = json.loads((SHAPES / f"{model.shape}.json").read_text(encoding="utf-8"))
    _shorten(values, layers)
    _add_tokens(values)
    (folder / CONFIG_FILE).write_text(json.dumps(values), encoding="utf-8")
    for name, settings in _PROCESSORS.items():
        if not (folder / name).exists():
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")


def _shorten(values: dict[str, Any], layers: int) -> None:
    if "num_hidden_layers" in values:
        values["num_hidden_layers"] = layers
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:layers]
    for key in _INNER:
        if isinstance(values.get(key), dict):
            _shorten(values[key], layers)


def _add_tokens(values: dict[str, Any]) -> None:
    inner = values.get("thinker_config", values)
    if "vision_config" not in inner:
        return
    for number, name in enumerate(_TOKENS):
        inner.setdefault(f"{name}_token_id", _FIRST_TOKEN + number)
    inner.setdefault("position_id_per_seconds", 13)
    if "audio_config" in inner:
        inner["audio_config"] = _AUDIO | inner["audio_config"]


@dataclass(frozen=True, kw_only=True)
class PlannedMedia:
    """Gives access to the frames of planned images, but not to pixels; ``items`` are the distinct items."""

    items: Sequence[MediaItem]
    frames: Mapping[str, np.ndarray]

    def fetch(self, items: Sequence[MediaItem]) -> None:
        """Does nothing, because the frames are there."""

    def tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """Returns the frames of an item."""
        return {"frames": self.frames[item.digest]}


def planned_media(config: RelaxConfig, work: Workload, architecture: Architecture) -> PlannedMedia | None:
    """Returns images with as many patches as the plan counts for a micro-batch, each as large as the largest item."""
    tower = architecture.vision
    if tower is None or work.media is None:
        return None
    merged = tower.merge_size**2
    rows, most = patches_of_micro_batch(config.parallel, work) // merged, work.media.item_patches // merged
    items, frames = list[MediaItem](), dict[str, np.ndarray]()
    while rows:
        size = min(rows, most)
        rows -= size
        height = max(side for side in range(1, int(size**0.5) + 1) if size % side == 0)
        grid = [1, tower.merge_size * height, tower.merge_size * (size // height)]
        image = image_rows(tower, grid=grid)
        item = MediaItem(
            kind="image",
            digest=f"planned-{len(items)}",
            token_ids=image.token_ids.astype("<i4").tobytes(),
            offsets=image.offsets.astype("<i4").tobytes(),
            advance=image.advance,
            placeholder=image.placeholder,
            grid=grid,
            width=grid[2] * tower.patch_size,
            height=grid[1] * tower.patch_size,
        )
        items.append(item)
        frames[item.digest] = np.zeros((1, item.height, item.width, 3), dtype=np.uint8)
    return PlannedMedia(items=items, frames=frames)


def largest_micro_batch(config: RelaxConfig, work: Workload, media: PlannedMedia | None) -> list[TokenTree]:
    """Returns trees with ``work.micro_batch_rows`` computed rows and the items of ``media``.

    Prompts and responses are as long as the plan counts them; the last group is shorter, so that the rows are filled.
    """
    branch = work.episode_rows - work.prompt_tokens
    items: list[MediaItem] = [] if media is None else list(media.items)
    left, trees = work.micro_batch_rows, list[TokenTree]()
    while left > 1:
        prompt = min(work.prompt_tokens, max(1, left - branch))
        if offline_rows(config) is None:
            episodes = max(1, min(work.group_size, (left - prompt) // branch))
            lengths = [min(branch, left - prompt) + 1] * episodes
        else:  # a pair is never split
            lengths = [min(branch, (left - prompt) // work.group_size) + 1] * work.group_size
        left -= prompt + sum(length - 1 for length in lengths)
        tree = answers_tree(config, f"group-{len(trees)}", prompt=prompt, lengths=lengths)
        trees.append(replace(tree, media=_placed(items, prompt)))
    return trees


def _placed(items: list[MediaItem], prompt: int) -> list[Media]:
    """Takes the items that fit into a prompt of ``prompt`` rows, and returns them at their rows."""
    placed, start = list[Media](), 0
    while items and start + items[0].rows <= prompt:
        item = items.pop(0)
        placed.append(Media(item, start, start + item.rows))
        start += item.rows
    return placed


def answers_tree(config: RelaxConfig, uid: str, *, prompt: int, lengths: Sequence[int]) -> TokenTree:
    """Returns a group: a prompt of ``prompt`` tokens and one response for each of ``lengths``, all of them trained."""
    ends = prompt + np.cumsum(lengths)
    rows, sampled = int(ends[-1]), np.arange(int(ends[-1])) >= prompt
    episodes = [
        Episode(
            f"{uid}.{index}", [end - 1], 1.0, {}, [Turn(end - length, end, "engine-0", [(0, length)], "stop")], "stop"
        )
        for index, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True))
    ]
    return TokenTree(
        group_uid=uid,
        token_ids=np.ones(rows, dtype=np.int32),
        end=np.concatenate([np.full(prompt, rows), np.repeat(ends, lengths)]).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        episodes=episodes,
        extras={"on_policy": np.ones(rows - prompt, dtype=bool), **_columns(config, rows=rows, tokens=rows - prompt)},
    )


def _columns(config: RelaxConfig, *, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """Returns the columns that the policy's loss reads beside those of the rollout."""
    needs = find_algorithm(config.algo.name).requirements(config.algo)
    found: dict[str, np.ndarray] = {c.ADVANTAGES: np.ones(tokens, dtype=np.float32)}
    names = {
        c.OLD_LOGPROBS: needs.old_logprobs == "actor_fwd",
        c.REFERENCE_LOGPROBS: needs.reference,
        c.TEACHER_LOGPROBS: needs.teacher is not None,
    }
    found |= {name: np.full(rows, -1.0, dtype=np.float32) for name, wanted in names.items() if wanted}
    if needs.teacher is not None and needs.teacher.top_k:
        top_k = needs.teacher.top_k
        found[c.TEACHER_TOP_IDS] = np.tile(np.arange(top_k, dtype=np.int32), (rows, 1))
        found[c.TEACHER_TOP_LOGPROBS] = np.full((rows, top_k), -1.0, dtype=np.float32)
    return found

"""Makes the builtin models that see: a Qwen3-VL, dense or with experts, with its processor files and a warm start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.families.architecture import VisionTower
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import CONFIG_FILE
from relax_core.families.tiny_configs import processor_files, tiny_config
from relax_core.families.vision.item_rows import image_rows, video_rows
from relax_core.tools.tiny_tokenizer import build_tokenizer
from relax_core.tools.tiny_warm_start import WARM_STARTS, SeeWarmStart, padded, supervised_steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_FRAMES_A_SECOND = 2.0  # of the videos of the warm start


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenExample:
    """Is one example: a question and its answer, and the frames that it is about.

    ``frames`` is uint8 ``[frames, height, width, 3]`` of an image (one frame) or a video, None for text alone.
    """

    prompt: str
    answer: str
    frames: np.ndarray | None = None
    is_video: bool = False


def write_vision_model(folder: Path, *, name: str, task: str) -> None:
    """Makes a model that sees and writes it in the layout in which Qwen3-VL is published.

    With one torch thread, the result is always the same.
    """
    import torch

    recipe = WARM_STARTS[name, task]
    assert isinstance(recipe, SeeWarmStart)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer(vision=True)
    tokenizer.save_pretrained(folder)
    config = tiny_config(name)
    write_settings(folder, config)
    tower = folder_architecture(folder).vision
    assert tower is not None, "the family has a tower"
    model = build_vision_model(config)

    def loss_of_step(step: int) -> Tensor:
        return _loss(model, tokenizer, tower, _examples(recipe, step))

    supervised_steps(model, recipe, loss_of_step)
    write_published(model, folder)


def write_published(model: PreTrainedModel, folder: Path) -> None:
    """Writes a Qwen3-VL's weights as published.

    Experts are transposed, which transformers' own save_pretrained leaves out for a model that it has not loaded.
    """
    from safetensors.torch import save_file

    tied = model.config.tie_word_embeddings
    weights = {
        name: weight.transpose(1, 2) if ".mlp.experts." in name else weight
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_settings(folder: Path, config: dict[str, Any]) -> None:
    """Writes the configuration of a model that sees, and its processor files."""
    for name, values in {CONFIG_FILE: config, **processor_files()}.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def build_vision_model(config: dict[str, Any]) -> PreTrainedModel:
    """Returns transformers' model of a configuration as published, with random weights."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    model: PreTrainedModel = model_class(model_class.config_class.from_dict(config))
    return model


def _loss(
    model: Any, tokenizer: PreTrainedTokenizerFast, tower: VisionTower, examples: Sequence[SeenExample]
) -> Tensor:
    import torch

    prompts, media = zip(*(_prompt(tokenizer, tower, one) for one in examples), strict=True)
    answers = [[*tokenizer.encode(one.answer), tokenizer.eos_token_id] for one in examples]
    ids, targets = padded(list(prompts), answers, pad=tokenizer.pad_token_id)
    positions = [rotary_of_sequence(ids.shape[1], one)[0] for one in media]
    hidden = model.model(
        input_ids=ids,
        position_ids=torch.from_numpy(np.stack(positions, axis=1)),
        **_tower_inputs(tower, examples, media),
    ).last_hidden_state
    rows = targets >= 0
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[rows]), targets[rows])


def _prompt(tokenizer: PreTrainedTokenizerFast, tower: VisionTower, one: SeenExample) -> tuple[list[int], list[Media]]:
    """Returns the ids of a prompt, with the rows of what it shows, and where these are."""
    kind = "video" if one.is_video else "image"
    parts = [] if one.frames is None else [{"type": kind}]
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": one.prompt}]}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if one.frames is None:
        return ids, []
    item = _item(tokenizer, tower, one.frames, is_video=one.is_video)
    length = len(item.placeholder)
    start = next(at for at in range(len(ids)) if ids[at : at + length] == item.placeholder)
    return [*ids[:start], *item.ids.tolist(), *ids[start + length :]], [Media(item, start, start + item.rows)]


def _item(tokenizer: PreTrainedTokenizerFast, tower: VisionTower, frames: np.ndarray, *, is_video: bool) -> MediaItem:
    count, height, width, _ = frames.shape
    steps = -(-count // tower.temporal_patch_size)
    grid = [steps, height // tower.patch_size, width // tower.patch_size]
    if is_video:
        step_s = tower.temporal_patch_size / _FRAMES_A_SECOND
        middle = (tower.temporal_patch_size - 1) / _FRAMES_A_SECOND / 2  # of the frames of a step
        stamps = [tokenizer.encode(f"<{step * step_s + middle:.1f} seconds>") for step in range(steps)]
        rows = video_rows(tower, grid=grid, stamps=stamps)
    else:
        rows = image_rows(tower, grid=grid)
    return MediaItem(
        kind="video" if is_video else "image",
        digest="",
        token_ids=rows.token_ids.tobytes(),
        offsets=rows.offsets.tobytes(),
        advance=rows.advance,
        placeholder=rows.placeholder,
        grid=grid,
        frames=count,
        width=width,
        height=height,
    )


def _tower_inputs(
    tower: VisionTower, examples: Sequence[SeenExample], media: Sequence[Sequence[Media]]
) -> dict[str, torch.Tensor]:
    """Returns patches and grids under the names that transformers gives them."""
    import torch

    from relax_core.families.vision.patches import patches_of

    found: dict[str, torch.Tensor] = {}
    for is_video, pixels, grids in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        shown = [
            (one.frames, items[0].item.grid)
            for one, items in zip(examples, media, strict=True)
            if items and one.frames is not None and one.is_video is is_video
        ]
        if shown:
            found[pixels] = torch.cat([patches_of(frames, tower) for frames, _ in shown])
            found[grids] = torch.tensor([grid for _, grid in shown])
    return found


_COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (230, 210, 50)}
_STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
_WORDS = ("north", "south", "east", "west")


def _examples(recipe: SeeWarmStart, step: int) -> list[SeenExample]:
    """Returns a step's examples: in turns a colour, a direction and a word."""
    numbers = range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
    found = [_example(recipe.seed, number) for number in numbers]
    if step >= recipe.blind_steps:
        return found
    choices = np.random.default_rng((recipe.seed, step)).integers(4, size=len(found))
    kinds = (list(_COLOURS), list(_STEPS), _WORDS)
    return [
        replace(one, answer=kinds[number % 3][choice])
        for one, number, choice in zip(found, numbers, choices.tolist(), strict=True)
    ]


def _example(seed: int, index: int) -> SeenExample:
    rng = np.random.default_rng((seed, index))
    part, choice = index % 3, int(rng.integers(4))
    if part == 2:
        return SeenExample(prompt=f"say {_WORDS[choice]}", answer=_WORDS[choice])
    ground = rng.integers(0, 50, 3)
    if part == 0:
        name = list(_COLOURS)[choice]
        size = 16 * rng.integers(2, 5, 2)
        frames = np.broadcast_to(ground, (1, *size, 3)).astype(np.uint8)
        top, left = (int(rng.integers(0, side // 2)) for side in size)
        frames[0, top : top + size[0] // 2, left : left + size[1] // 2] = _COLOURS[name]
        return SeenExample(prompt="which colour?", answer=name, frames=frames)
    name = list(_STEPS)[choice]
    frames = np.broadcast_to(ground, (8, 48, 48, 3)).astype(np.uint8)
    down, right = _STEPS[name]
    across = int(rng.integers(2, 34))
    for number in range(8):
        along = 1 + 5 * (number if down + right > 0 else 7 - number) - 2
        y, x = (max(0, along), across) if down else (across, max(0, along))
        frames[number, y : y + 12, x : x + 12] = (240, 220, 180)
    return SeenExample(prompt="which way?", answer=name, frames=frames, is_video=True)

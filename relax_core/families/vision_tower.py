"""Defines vision towers for trainer, engines and encoder: weight shapes, settings, and the rows of an item.

The rows of an image or a video have token ids, rotary offsets and an advance of the positions (rules of Qwen3-VL and
Qwen3-Omni). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_core.contracts.family import Family, HfConfig, Vision
from relax_core.families.architecture import PatchSettings, VisionTower
from relax_core.families.hf_config import read_object

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MergerNames:
    """Holds the names of a merger's norm and of its two matrices, and the name of the list of deepstack mergers."""

    norm: str
    first: str
    second: str
    deepstack: str


VL_MERGER = MergerNames(norm="norm", first="linear_fc1", second="linear_fc2", deepstack="deepstack_merger_list")
OMNI_MERGER = MergerNames(norm="ln_q", first="mlp.0", second="mlp.2", deepstack="merger_list")


def qwen3_vl_vision_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-VL's tower by their names after the tower's prefix."""
    return _vision_shapes(config, VL_MERGER)


def qwen3_omni_vision_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-Omni's tower by their names after the tower's prefix."""
    return _vision_shapes(config, OMNI_MERGER)


def _vision_shapes(config: HfConfig, names: MergerNames) -> dict[str, Shape]:
    hidden, wide, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    patch = (config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    merged = hidden * config["spatial_merge_size"] ** 2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (hidden, config["in_channels"], *patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (config["num_position_embeddings"], hidden),
    }
    for index in range(config["depth"]):
        block = f"blocks.{index}."
        shapes |= norm_shapes(f"{block}norm1", hidden)
        shapes |= norm_shapes(f"{block}norm2", hidden)
        shapes |= linear_shapes(f"{block}attn.qkv", hidden, 3 * hidden)
        shapes |= linear_shapes(f"{block}attn.proj", hidden, hidden)
        shapes |= linear_shapes(f"{block}mlp.linear_fc1", hidden, wide)
        shapes |= linear_shapes(f"{block}mlp.linear_fc2", wide, hidden)
    for merger, norm in _mergers(config, names, hidden=hidden, merged=merged):
        shapes |= norm_shapes(f"{merger}.{names.norm}", norm)
        shapes |= linear_shapes(f"{merger}.{names.first}", merged, merged)
        shapes |= linear_shapes(f"{merger}.{names.second}", merged, out)
    return shapes


def _mergers(config: HfConfig, names: MergerNames, *, hidden: int, merged: int) -> Iterator[tuple[str, int]]:
    """Yields the name of each merger and the width of its norm; deepstack mergers apply the norm after merging."""
    yield "merger", hidden
    for level in range(len(config.get("deepstack_visual_indexes") or ())):
        yield f"{names.deepstack}.{level}", merged


def norm_shapes(name: str, width: int) -> dict[str, Shape]:
    """Returns the shapes of a norm's weight and bias by name."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """Returns the shapes of a matrix and its bias by name."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"


def read_tower(family: Family, hf_config: HfConfig, *, model_folder: Path) -> VisionTower | None:
    """Returns the vision tower of a folder, or None if the model's family reads text only.

    Raises ValueError for a missing processor file or key.
    """
    if family.vision is None:
        return None
    image = _processor_settings(model_folder, IMAGE_FILE)
    bounds = family.vision.video_pixels
    if bounds is not None and not (model_folder / VIDEO_FILE).is_file():
        video: Mapping[str, Any] = {"min_pixels": bounds[0], "max_pixels": bounds[1]}
    else:
        video = _processor_settings(model_folder, VIDEO_FILE)
    try:
        return tower_of(family.vision, hf_config, image=image, video=video)
    except KeyError as error:
        raise ValueError(
            f"model.path={model_folder}: config.json or {IMAGE_FILE} has no {error.args[0]}, which family "
            f"{family.name} needs. Fetch the folder again, with its processor files."
        ) from error


def tower_of(vision: Vision, hf_config: HfConfig, *, image: Mapping[str, Any], video: Mapping[str, Any]) -> VisionTower:
    """Returns the vision tower that a config.json and the contents of both processor files describe.

    Raises KeyError for a missing key.
    """
    scale = 1.0 / image.get("rescale_factor", 1 / 255)
    pixels, video_pixels = _pixels(image), _pixels(video)
    config = hf_config[vision.config_key]
    return VisionTower(
        vision=vision,
        config=config,
        patch_size=config["patch_size"],
        temporal_patch_size=config["temporal_patch_size"],
        merge_size=config["spatial_merge_size"],
        deepstack_layers=len(config.get("deepstack_visual_indexes") or ()),
        hidden_size=config["hidden_size"],
        num_layers=config["depth"],
        num_heads=config["num_heads"],
        intermediate_size=config["intermediate_size"],
        image_token_id=hf_config["image_token_id"],
        video_token_id=hf_config["video_token_id"],
        vision_start_token_id=hf_config["vision_start_token_id"],
        vision_end_token_id=hf_config["vision_end_token_id"],
        mean=tuple(value * scale for value in image["image_mean"]),
        std=tuple(value * scale for value in image["image_std"]),
        min_pixels=pixels[0],
        max_pixels=pixels[1],
        video_min_pixels=video_pixels[0],
        video_max_pixels=video_pixels[1],
        frame_bounds=vision.frame_bounds,
        positions_per_second=None if vision.seconds_key is None else hf_config[vision.seconds_key],
    )


def _processor_settings(model_folder: Path, name: str) -> Mapping[str, Any]:
    file = model_folder / name
    if not file.exists():
        raise ValueError(
            f"model.path={model_folder}: no {name} there, which a model with vision input needs. Fetch the folder "
            "again, with its processor files."
        )
    return read_object(file)


def _pixels(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the smallest and largest number of pixels; older files call them min_pixels and max_pixels."""
    size = settings.get("size") or {}
    smallest = size.get("shortest_edge", settings.get("min_pixels"))
    largest = size.get("longest_edge", settings.get("max_pixels"))
    if smallest is None or largest is None:
        raise KeyError("size.shortest_edge and size.longest_edge")
    return smallest, largest


class ItemRows(NamedTuple):
    """Holds the rows of an item: ids int32 ``[rows]``, offsets ``[3, rows]``, and the advance of the positions.

    Offsets are int32, or float32 if they may be fractions.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    advance: float
    placeholder: list[int]


def image_rows(tower: PatchSettings, *, grid: Sequence[int]) -> ItemRows:
    """Returns the rows of an image with ``grid`` (1, height, width) in patches."""
    offsets, advance = _grid_offsets(tower, grid)
    ids = np.full(offsets.shape[1], tower.image_token_id, dtype=np.int32)
    return ItemRows(ids, offsets, advance, [tower.image_token_id])


def feature_rows(tower: PatchSettings, token_ids: np.ndarray) -> np.ndarray:
    """Returns which rows of an item get a feature of the tower, bool ``[rows]``; time stamps are text."""
    found: np.ndarray = (token_ids == tower.image_token_id) | (token_ids == tower.video_token_id)
    return found


def _grid_offsets(tower: PatchSettings, grid: Sequence[int]) -> tuple[np.ndarray, int]:
    """Returns the offsets of one frame's rows, and the advance of the positions: the frame's longer side in rows."""
    height, width = grid[1] // tower.merge_size, grid[2] // tower.merge_size
    rows = np.zeros((3, height, width), dtype=np.int32)
    rows[1] = np.arange(height)[:, None]
    rows[2] = np.arange(width)
    return rows.reshape(3, -1), max(height, width)


def video_rows(tower: PatchSettings, *, grid: Sequence[int], stamps: Sequence[Sequence[int]]) -> ItemRows:
    """Returns the rows of a video with ``grid`` (time, height, width) in patches.

    ``stamps`` has the token ids of each step's time stamp, for example "<0.2 seconds>". A step is the stamp, the token
    that begins vision, the rows of the frame, and the token that ends vision. All steps together replace one token. The
    chat template's pair of vision tokens around a video stays around the steps, as in transformers' Qwen3VLProcessor
    and in SGLang.
    """
    frame, advance = _grid_offsets(tower, grid)
    ids: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    position = 0
    for stamp in stamps:
        before = [*stamp, tower.vision_start_token_id]
        ids += [np.array(before), np.full(frame.shape[1], tower.video_token_id), np.array([tower.vision_end_token_id])]
        offsets.append(np.repeat(position + np.arange(len(before))[None], 3, axis=0))
        position += len(before)
        offsets.append(frame + position)
        position += advance
        offsets.append(np.full((3, 1), position))
        position += 1
    assert len(stamps) == grid[0], "a video has one time stamp for each step of its grid"
    return ItemRows(
        np.concatenate(ids).astype(np.int32),
        np.concatenate(offsets, axis=1).astype(np.int32),
        position,
        [tower.video_token_id],
    )


def timed_video_rows(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> ItemRows:
    """Returns the rows of a video without time stamps; ``seconds`` is the time between two steps of its grid.

    The first rotary position is the time of a row. The offsets are float32, because a step may be a fraction of a
    position. The rows replace one token inside the pair of vision tokens.
    """
    offsets = timed_offsets(tower, grid=grid, seconds=seconds)
    ids = np.full(offsets.shape[1], tower.video_token_id, dtype=np.int32)
    return ItemRows(ids, offsets, float(offsets.max()) + 1, [tower.video_token_id])


def timed_offsets(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> np.ndarray:
    """Returns the offsets of a timed video's rows, float32 ``[3, rows]``, with the same rounding as transformers."""
    assert tower.positions_per_second is not None, "the videos of this family have time stamps"
    frame, _ = _grid_offsets(tower, grid)
    offsets = np.tile(frame.astype(np.float32), (1, grid[0]))
    steps = np.arange(grid[0], dtype=np.float32) * np.float32(seconds) * np.float32(tower.positions_per_second)
    offsets[0] = np.repeat(steps, frame.shape[1])
    return offsets


def step_times(tower: PatchSettings, *, grid: Sequence[int], seconds: float) -> np.ndarray:
    """Returns the time of each row of a timed video in positions, float64 ``[rows]``.

    transformers' processor orders the rows of video and sound in float64, too.
    """
    assert tower.positions_per_second is not None, "the videos of this family have time stamps"
    times: np.ndarray = np.repeat(np.arange(grid[0]) * seconds * tower.positions_per_second, _frame_rows(tower, grid))
    return times


def _frame_rows(tower: PatchSettings, grid: Sequence[int]) -> int:
    return grid[1] // tower.merge_size * (grid[2] // tower.merge_size)

"""Reads a model's vision tower and its image and video settings from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.contracts.family import Family, HfConfig, Vision
from relax_core.families.architecture import VisionTower
from relax_core.families.hf_config import read_object

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"


def read_tower(family: Family, hf_config: HfConfig, *, model_folder: Path) -> VisionTower | None:
    """Returns the vision tower of a folder, None if its family reads text only.

    Raises ValueError for a missing processor file or key.
    """
    if family.vision is None:
        return None
    image = _settings(model_folder, IMAGE_FILE)
    bounds = family.vision.video_pixels
    if bounds is not None and not (model_folder / VIDEO_FILE).is_file():
        video: Mapping[str, Any] = {"min_pixels": bounds[0], "max_pixels": bounds[1]}
    else:
        video = _settings(model_folder, VIDEO_FILE)
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


def _settings(model_folder: Path, name: str) -> Mapping[str, Any]:
    file = model_folder / name
    if not file.exists():
        raise ValueError(
            f"model.path={model_folder}: no {name} there, which a model that sees needs. Fetch the folder again, with "
            "its processor files."
        )
    try:
        settings: Mapping[str, Any] = read_object(file)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Fetch it again.") from error
    return settings


def _pixels(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the smallest and largest number of pixels; older files call them min_pixels and max_pixels."""
    size = settings.get("size") or {}
    smallest = size.get("shortest_edge", settings.get("min_pixels"))
    largest = size.get("longest_edge", settings.get("max_pixels"))
    if smallest is None or largest is None:
        raise KeyError("size.shortest_edge and size.longest_edge")
    return smallest, largest

"""Makes media items for tests, with rows by Qwen3-VL's rules and random tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from relax_core.contracts.family import Vision
from relax_core.contracts.media import MediaItem, MediaKind
from relax_core.contracts.media_file import item_digest, write_item
from relax_core.families.architecture import VisionTower
from relax_core.families.vision_tower import ItemRows, image_rows, video_rows

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # token ids for the tower below
TOWER = VisionTower(
    vision=Vision(prefix="model.visual.", model="", config="", shapes=lambda config: {}),
    config={},
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    deepstack_layers=1,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=32,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)


def image_item(height: int, width: int, *, seed: int = 0, folder: Path | None = None) -> MediaItem:
    """Returns an image of ``height`` × ``width`` rows. Writes its file if a folder is given."""
    return item_of(TOWER, _pixels(1, height, width, seed), folder=folder)


def video_item(
    stamps: Sequence[Sequence[int]], height: int, width: int, *, seed: int = 0, folder: Path | None = None
) -> MediaItem:
    """Returns a video of ``height`` × ``width`` rows at each time stamp."""
    return item_of(TOWER, _pixels(2 * len(stamps), height, width, seed), stamps=stamps, seconds=1.0, folder=folder)


def item_of(
    tower: VisionTower,
    frames: np.ndarray,
    *,
    stamps: Sequence[Sequence[int]] | None = None,
    seconds: float = 0.0,
    folder: Path | None = None,
) -> MediaItem:
    """Makes the item of ``frames``, uint8 ``[frames, height, width, 3]``, and writes its file if a folder is given.

    With ``stamps`` (the tokens of each time stamp) the item is a video, otherwise an image.
    """
    grid = grid_of(tower, frames)
    rows = image_rows(tower, grid=grid) if stamps is None else video_rows(tower, grid=grid, stamps=stamps)
    kind: MediaKind = "image" if stamps is None else "video"
    return item_of_rows(tower, kind, rows, {"frames": frames}, seconds=seconds, folder=folder)


def grid_of(tower: VisionTower, frames: np.ndarray) -> list[int]:
    count, height, width, _ = frames.shape
    return [-(-count // tower.temporal_patch_size), height // tower.patch_size, width // tower.patch_size]


def item_of_rows(
    tower: VisionTower,
    kind: MediaKind,
    rows: ItemRows,
    tensors: Mapping[str, np.ndarray],
    *,
    seconds: float,
    folder: Path | None,
) -> MediaItem:
    """Makes an item from rows and tensors: ``frames``, ``features`` or both."""
    frames, features = tensors.get("frames"), tensors.get("features")
    fractional = rows.offsets.dtype.kind == "f"
    item = MediaItem(
        kind=kind,
        digest=item_digest(kind.encode(), tensors),
        token_ids=rows.token_ids.astype("<i4").tobytes(),
        offsets=rows.offsets.astype("<f4" if fractional else "<i4").tobytes(),
        advance=rows.advance,
        fractional=fractional,
        placeholder=rows.placeholder,
        grid=[0, 0, 0] if frames is None else grid_of(tower, frames),
        seconds=seconds,
        frames=0 if frames is None else len(frames),
        width=0 if frames is None else frames.shape[2],
        height=0 if frames is None else frames.shape[1],
        audio_frames=0 if features is None else features.shape[1],
    )
    return item if folder is None else write_item(folder, item, tensors)


def _pixels(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    size = TOWER.patch_size * TOWER.merge_size
    shape = (frames, size * height, size * width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

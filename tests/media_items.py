"""Media items for tests, with the rows that Qwen3-VL's rules give them and tensors of chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relax_core.contracts.family import Vision
from relax_core.contracts.media import MediaItem
from relax_core.contracts.media_file import item_digest, write_item
from relax_core.families.architecture import VisionTower
from relax_core.families.vision.item_rows import ItemRows, image_rows, video_rows

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # the tokens of the tower below
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
    """An image of ``height`` × ``width`` rows; its file is written if there is a folder."""
    grid = [1, 2 * height, 2 * width]
    return _item("image", image_rows(TOWER, grid=grid), grid, frames=1, seed=seed, folder=folder)


def video_item(
    stamps: Sequence[Sequence[int]], height: int, width: int, *, seed: int = 0, folder: Path | None = None
) -> MediaItem:
    """A video of ``height`` × ``width`` rows at each time stamp."""
    grid = [len(stamps), 2 * height, 2 * width]
    rows = video_rows(TOWER, grid=grid, stamps=stamps)
    return _item("video", rows, grid, frames=2 * len(stamps), seed=seed, folder=folder)


def _item(kind: str, rows: ItemRows, grid: list[int], *, frames: int, seed: int, folder: Path | None) -> MediaItem:
    height, width = 4 * grid[1], 4 * grid[2]
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    item = MediaItem(
        kind="image" if kind == "image" else "video",
        digest=item_digest(kind.encode(), {"frames": pixels}),
        token_ids=rows.token_ids.astype("<i4").tobytes(),
        offsets=rows.offsets.astype("<i4").tobytes(),
        advance=rows.advance,
        placeholder=rows.placeholder,
        grid=grid,
        seconds=0.0 if kind == "image" else 1.0,
        frames=frames,
        width=width,
        height=height,
    )
    return item if folder is None else write_item(folder, item, {"frames": pixels})

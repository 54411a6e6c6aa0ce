"""Makes media items for the bus's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from relax_core.contracts.columns import MEDIA
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import item_digest, write_item


def make_item(folder: Path, seed: int, *, height: int = 28, width: int = 28) -> tuple[MediaItem, np.ndarray]:
    """Writes an image of random pixels. Returns the item and its frames, uint8 ``[1, height, width, 3]``."""
    frames = np.random.default_rng(seed).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    item = MediaItem(
        kind="image",
        digest=item_digest(b"test", {"frames": frames}),
        token_ids=np.arange(4, dtype="<i4").tobytes(),
        offsets=np.zeros((3, 4), "<i4").tobytes(),
        advance=2.0,
        placeholder=[7],
        grid=[1, 2, 2],
        width=width,
        height=height,
    )
    return write_item(folder, item, {"frames": frames}), frames


def media_columns(items: Sequence[MediaItem]) -> dict[str, bytes]:
    """Returns the columns of a group with these items: "a", and the media column."""
    placed = [Media(item, 4 * number, 4 * number + 4) for number, item in enumerate(items)]
    return {"a": b"x", MEDIA: msgspec.msgpack.encode(placed)}


def held(*items: MediaItem) -> dict[str, int]:
    """Returns the argument of `Bus.hold` for these items."""
    return {item.digest: item.nbytes for item in items}

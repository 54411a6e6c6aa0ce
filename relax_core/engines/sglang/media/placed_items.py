"""Names the items of a request to a server of the run, and finds them in the server's media folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.families.architecture import VisionTower
from relax_core.families.vision.item_rows import feature_rows

MEDIA_FOLDER = "RELAX_MEDIA_FOLDER"  # the environment variable of the folder that has the items of requests
VISION_FOLDER = "RELAX_VISION_FOLDER"  # that of the model's folder, if the model has a vision tower


def placed_name(media: Media) -> str:
    """Returns the entry of SGLang's field image_data that names an item and its first row: "digest:row"."""
    return f"{media.item.digest}:{media.start}"


def find_items(
    names: Sequence[object], token_ids: Sequence[int], *, tower: VisionTower, reader: FolderReader | None
) -> list[tuple[Media, np.ndarray]]:
    """Returns the items that a request names, with their frames, uint8 ``[frames, height, width, 3]``.

    Raises ValueError for an entry that is no `placed_name`, an item that is not in the folder or was encoded for
    another model, and for tokens of an image or video that no item explains.
    """
    ids = np.array(token_ids, dtype=np.int64)
    blind = feature_rows(tower, ids)
    found: list[tuple[Media, np.ndarray]] = []
    done = 0
    for name in names:
        digest, start = _parts(name)
        if reader is None:
            raise ValueError(f"image_data {digest}: this server was started without a media folder.")
        item, tensors = reader.open(digest)
        one = Media(item, start, start + item.rows)
        if start < done or not np.array_equal(ids[start : one.end], item.ids):
            raise ValueError(f"image_data {digest}: input_ids from {start} are not the item's {item.rows} ids.")
        if int(feature_rows(tower, item.ids).sum()) * tower.merge_size**2 != item.patches:
            raise ValueError(f"image_data {digest}: it was encoded for another model.")
        blind[start : one.end] = False
        found.append((one, tensors["frames"]))
        done = one.end
    if blind.any():
        first = int(np.flatnonzero(blind)[0])
        raise ValueError(
            f"token {int(ids[first])} at {first} stands for an image or video, and no image_data is there."
        )
    return found


def _parts(name: object) -> tuple[str, int]:
    digest, colon, start = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not colon or not start.isdecimal():
        raise ValueError("image_data: this server takes items of its media folder only, as digest:row.")
    return digest, int(start)


def step_spans(item_ids: np.ndarray, tower: VisionTower, *, start: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last row of each step of an item's grid, counted from the prompt's begin.

    ``start`` is the item's first row. An image is one step; the steps of a video have a time stamp between them.
    """
    edges = np.diff(np.concatenate([[0], feature_rows(tower, item_ids).astype(np.int8), [0]]))
    for first, after in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True):
        yield start + first, start + after - 1

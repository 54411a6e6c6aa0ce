"""Encodes the media items of a request to a server of the run as names, and finds the items in the media folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.families.towers import Towers

MEDIA_FOLDER = "RELAX_MEDIA_FOLDER"  # environment variable: folder of the requests' media items
VISION_FOLDER = "RELAX_VISION_FOLDER"  # environment variable: folder of a model with a vision tower


def placed_name(media: Media) -> str:
    """Returns the entry of SGLang's field image_data for an item and its first row: "digest:row"."""
    return f"{media.item.digest}:{media.start}"


def find_items(
    names: Sequence[object], token_ids: Sequence[int], *, towers: Towers, reader: FolderReader | None
) -> list[tuple[Media, Mapping[str, np.ndarray]]]:
    """Returns the media items of a request, with their tensors (`relax_core.contracts.media.MediaItem`).

    Raises ValueError for an invalid entry, for an item that is missing in the folder or was encoded for another model,
    and for placeholder tokens without an item.
    """
    ids = np.array(token_ids, dtype=np.int64)
    blind = towers.feature_rows(ids)
    found: list[tuple[Media, Mapping[str, np.ndarray]]] = []
    done = 0
    for name in names:
        digest, start = _parts(name)
        if reader is None:
            raise ValueError(f"image_data {digest}: this server was started without a media folder.")
        item, tensors = reader.open(digest)
        medium = Media(item, start, start + item.rows)
        if start < done or not np.array_equal(ids[start : medium.end], item.ids):
            raise ValueError(f"image_data {digest}: input_ids from {start} are not the item's {item.rows} ids.")
        if int(towers.feature_rows(item.ids).sum()) != towers.features(item):
            raise ValueError(f"image_data {digest}: it was encoded for another model.")
        blind[start : medium.end] = False
        found.append((medium, tensors))
        done = medium.end
    if blind.any():
        first = int(np.flatnonzero(blind)[0])
        raise ValueError(
            f"token {int(ids[first])} at {first} stands for an image, video or sound, and no image_data is there."
        )
    return found


def _parts(name: object) -> tuple[str, int]:
    digest, colon, start = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not colon or not start.isdecimal():
        raise ValueError("image_data: this server takes items of its media folder only, as digest:row.")
    return digest, int(start)


Span = tuple[int, int]  # first and last row, as positions in the prompt


def step_spans(media: Media, towers: Towers) -> list[Span]:
    """Returns the rows of each step of an item's grid; an image is one step. The rows of a step are contiguous."""
    ids = media.item.ids
    rows = media.start + np.flatnonzero(towers.feature_rows(ids) & ~towers.audio_rows(ids))
    return [_span(step) for step in np.split(rows, media.item.grid[0])] if rows.size else []


def sound_spans(media: Media, towers: Towers) -> list[Span]:
    """Returns the contiguous rows of an item's sound. The steps of a video are between the rows of its sound."""
    rows = media.start + np.flatnonzero(towers.audio_rows(media.item.ids))
    return [_span(run) for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)] if rows.size else []


def _span(rows: np.ndarray) -> Span:
    return int(rows[0]), int(rows[-1])


FRACTION_UNITS = 2**20  # a fraction of a rotary position is a number of these parts; float32 has fewer at 8 and above
WHOLE_BITS = 32  # of a packed position; the parts are in the bits above


def packed_positions(positions: np.ndarray) -> np.ndarray:
    """Packs rotary positions, float64 or int64, into int64: the lower half has the whole part, the upper the fraction.

    SGLang stores positions as int64, adds whole numbers to them, and knows no fractions. Such sums keep the fraction.
    A position without a fraction is unchanged.
    """
    parts = np.rint(np.asarray(positions, dtype=np.float64) * FRACTION_UNITS).astype(np.int64)
    whole = parts // FRACTION_UNITS
    packed: np.ndarray = ((parts - whole * FRACTION_UNITS) << WHOLE_BITS) + whole
    return packed

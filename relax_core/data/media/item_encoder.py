"""Encodes one image or video into a media item: its rows, its offsets and its uint8 frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from relax_core.contracts.media import MediaError, MediaItem, MediaSource
from relax_core.contracts.media_file import item_digest
from relax_core.data.media.image_decoding import decoded_image, opened_image, resized, upright_size
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_sizes import image_size, video_size
from relax_core.data.media.source_files import open_source
from relax_core.data.media.video_decoding import decode_frames, sample_frames, stamp_seconds, video_index
from relax_core.families.architecture import PatchSettings
from relax_core.families.vision.item_rows import ItemRows, image_rows, video_rows

Tokenize = Callable[[str], Sequence[int]]
Encoded = tuple[MediaItem, dict[str, np.ndarray]]
_FORMAT = 1  # the digest's version: it changes when the same source and settings give another item


def encode_item(
    source: MediaSource, tower: PatchSettings, limits: MediaLimits, *, root: Path, tokenize: Tokenize
) -> Encoded:
    """Returns the item of a source and its tensors: ``frames``, uint8 ``[frames, height, width, 3]``.

    ``tokenize`` returns the ids of a video's time stamps. Sources with the same pixels and times give the same digest.
    Raises MediaError, whose text begins with the name of the source.
    """
    try:
        opened = open_source(source, limits, root=root)
        with opened.file:
            if source.kind == "image":
                return _encode_image(opened.file, opened.form, tower, limits)
            return _encode_video(opened.file, opened.form, tower, limits, tokenize=tokenize)
    except MediaError as error:
        raise MediaError(source.kind, error.word, f"{source.words}: {error}") from error


def _encode_image(file: IO[bytes], form: str, tower: PatchSettings, limits: MediaLimits) -> Encoded:
    with opened_image(file, form, limits) as image:
        height, width = upright_size(image)
        size = image_size(tower, limits, height=height, width=width)
        pixels = resized(decoded_image(image, file), height=size[0], width=size[1])
    return image_item(tower, pixels, height=height, width=width)


def _encode_video(
    file: IO[bytes], form: str, tower: PatchSettings, limits: MediaLimits, *, tokenize: Tokenize
) -> Encoded:
    from PIL import Image

    step = tower.temporal_patch_size
    index = video_index(file, form, limits)
    fps = index.header.fps
    indices = sample_frames(index.header.frames, fps, limits)
    indices += [indices[-1]] * max(0, step - len(indices))  # a video has at least one step
    frames = np.zeros(0, np.uint8)
    height = width = 0
    for number, frame in enumerate(decode_frames(file, form, limits, index, indices)):
        if number == 0:
            height, width = frame.shape[:2]
            size = video_size(tower, limits, frames=len(indices), height=height, width=width)
            frames = np.empty((len(indices), *size, 3), dtype=np.uint8)
        frames[number] = resized(Image.fromarray(frame), height=size[0], width=size[1])
    return video_item(tower, frames, indices, fps=fps, height=height, width=width, tokenize=tokenize)


def image_item(tower: PatchSettings, pixels: np.ndarray, *, height: int, width: int) -> Encoded:
    """Returns the item of a resized image, uint8 ``[height, width, 3]``; the keywords are the size of its source."""
    grid = [1, pixels.shape[0] // tower.patch_size, pixels.shape[1] // tower.patch_size]
    item = _item(image_rows(tower, grid=grid), kind="image", grid=grid, height=height, width=width)
    return _with_digest(item, {"frames": pixels[None]}, tower)


def video_item(
    tower: PatchSettings,
    frames: np.ndarray,
    indices: Sequence[int],
    *,
    fps: float,
    height: int,
    width: int,
    tokenize: Tokenize,
) -> Encoded:
    """Returns the item of a video's resized frames, uint8 ``[frames, height, width, 3]``.

    ``indices`` are their numbers in the source, which has ``fps`` frames per second and frames of the given size.
    """
    seconds = stamp_seconds(indices, fps, tower.temporal_patch_size)
    grid = [len(seconds), frames.shape[1] // tower.patch_size, frames.shape[2] // tower.patch_size]
    stamps = [tokenize(f"<{at:.1f} seconds>") for at in seconds]
    item = _item(video_rows(tower, grid=grid, stamps=stamps), kind="video", grid=grid, height=height, width=width)
    between = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 0.0
    item = msgspec.structs.replace(item, seconds=between, frames=len(indices))
    return _with_digest(item, {"frames": frames}, tower)


def _item(rows: ItemRows, *, kind: str, grid: list[int], height: int, width: int) -> MediaItem:
    return MediaItem(
        kind=kind,  # type: ignore[arg-type]
        digest="",
        token_ids=rows.token_ids.astype("<i4").tobytes(),
        offsets=rows.offsets.astype("<i4").tobytes(),
        advance=rows.advance,
        placeholder=rows.placeholder,
        grid=grid,
        height=height,
        width=width,
    )


def _with_digest(item: MediaItem, tensors: Mapping[str, np.ndarray], tower: PatchSettings) -> Encoded:
    """Returns the item with its digest over record, pixel settings of the tower and tensors."""
    pixels = (tower.patch_size, tower.temporal_patch_size, tower.merge_size, tower.mean, tower.std)
    settings = msgspec.msgpack.encode((_FORMAT, item, pixels))
    return msgspec.structs.replace(item, digest=item_digest(settings, tensors)), dict(tensors)

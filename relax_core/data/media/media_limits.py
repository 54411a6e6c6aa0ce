"""Defines the limits of images, videos and sounds, and computes the sizes of resized images and frames.

The Qwen-VL processors compute the same sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_core.contracts.media import MediaError, MediaKind
from relax_core.families.architecture import PatchSettings


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Holds the limits of items and their sources. Each limit is checked before the work that it limits.

    An image gets ``image_rows_min`` to ``image_rows_max`` rows, within the bounds of the model's processor. A frame
    step of a video gets at most ``frame_rows`` rows. ``source_pixels`` limits width times height of an image or a frame
    before its resize. ``video_frames_min`` to ``video_frames_max`` frames of a video are sampled, at ``video_fps``
    frames per second; the source has at most ``source_frames`` frames and ``source_seconds`` seconds. A sound or a
    sound track has ``audio_seconds_min`` to ``audio_seconds_max`` seconds. ``item_bytes`` limits the size of the source
    file. A worker may use ``worker_timeout_s`` seconds for an item and ``worker_bytes`` bytes of address space.
    """

    image_rows_min: int = 4
    image_rows_max: int = 1024
    source_pixels: int = 64_000_000
    video_fps: float = 2.0
    video_frames_min: int = 4
    video_frames_max: int = 64
    frame_rows: int = 128
    source_frames: int = 216_000
    source_seconds: float = 3600.0
    audio_seconds_min: float = 0.1
    audio_seconds_max: float = 30.0
    item_bytes: int = 64 << 20
    worker_timeout_s: float = 120.0
    worker_bytes: int = 4 << 30


MAX_ASPECT = 200  # the processors refuse an image if the longer side is more than this times the shorter side


def image_size(tower: PatchSettings, limits: MediaLimits, *, height: int, width: int) -> tuple[int, int]:
    """Returns height and width of an image after its resize, multiples of the patch times the merge size.

    Raises MediaError if the image has more than ``limits.image_rows_max`` rows at its smallest size.
    """
    check_source_size("image", limits, height=height, width=width)
    factor = tower.patch_size * tower.merge_size
    largest = min(tower.max_pixels, limits.image_rows_max * factor**2)
    smallest = min(max(tower.min_pixels, limits.image_rows_min * factor**2), largest)
    size = _fit(height, width, factor=factor, frames=1, counted=1, smallest=smallest, largest=largest)
    _check_rows("image", size, factor=factor, most=limits.image_rows_max)
    return size


def video_size(tower: PatchSettings, limits: MediaLimits, *, frames: int, height: int, width: int) -> tuple[int, int]:
    """Returns height and width of the resized frames of a video with ``frames`` sampled frames.

    Raises MediaError if a frame step has more than ``limits.frame_rows`` rows at its smallest size.
    """
    check_source_size("video", limits, height=height, width=width)
    factor, step = tower.patch_size * tower.merge_size, tower.temporal_patch_size
    if tower.frame_bounds:
        largest = min(tower.video_max_pixels, limits.frame_rows * factor**2)
        smallest = min(tower.video_min_pixels, largest)
        size = _fit(height, width, factor=factor, frames=1, counted=1, smallest=smallest, largest=largest)
        _check_rows("video", size, factor=factor, most=limits.frame_rows)
        return size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    counted = round(frames / step) * step  # the processor rounds the number of steps to the nearest integer
    largest = min(tower.video_max_pixels, limits.frame_rows * factor**2 * min(frames, counted))
    smallest = min(tower.video_min_pixels, largest)
    size = _fit(height, width, factor=factor, frames=frames, counted=counted, smallest=smallest, largest=largest)
    _check_rows("video", size, factor=factor, most=limits.frame_rows)
    return size


def check_source_size(kind: MediaKind, limits: MediaLimits, *, height: int, width: int) -> None:
    """Raises MediaError for a source without pixels, with too many pixels, or with a side that is too long."""
    if height < 1 or width < 1:
        raise MediaError(kind, "truncated", f"its header says {width}×{height} pixels.")
    if height * width > limits.source_pixels:
        raise MediaError(
            kind,
            "too_many_pixels",
            f"{width}×{height} are more than {limits.source_pixels:,} pixels. Store it smaller.",
        )
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(
            kind, "bad_aspect", f"{width}×{height}: a side is more than {MAX_ASPECT} times the other. Crop it."
        )


def _fit(
    height: int, width: int, *, factor: int, frames: int, counted: int, smallest: int, largest: int
) -> tuple[int, int]:
    """Returns the nearest multiples of ``factor`` to the given size with a total number of pixels within the bounds."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    pixels = counted * rounded[0] * rounded[1]
    if pixels > largest:
        beta = math.sqrt(frames * height * width / largest)
        return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if pixels < smallest:
        beta = math.sqrt(smallest / (frames * height * width))
        return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return rounded


def _check_rows(kind: MediaKind, size: tuple[int, int], *, factor: int, most: int) -> None:
    rows = size[0] * size[1] // factor**2
    if rows > most:
        what = "it" if kind == "image" else "a frame of it"
        raise MediaError(
            kind, "too_many_tokens", f"{what} has {rows} rows at its smallest size, and the limit is {most}."
        )

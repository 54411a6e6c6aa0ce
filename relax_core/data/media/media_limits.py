"""The limits of images, videos and sounds: how large an item may be, and what its source may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Bounds items and their sources; each field is checked before the work that it bounds.

    An image becomes ``image_rows_min`` to ``image_rows_max`` rows, within the bounds of the model's own processor, and
    a frame step of a video at most ``frame_rows``. ``source_pixels`` bounds width times height of an image or a frame
    before its resize. A video is sampled at ``video_fps`` frames per second, ``video_frames_min`` to
    ``video_frames_max`` frames in all; its source has at most ``source_frames`` frames and ``source_seconds`` seconds.
    A sound, also that of a video, has ``audio_seconds_min`` to ``audio_seconds_max`` seconds. ``item_bytes`` bounds the
    size of the file. A worker may take ``worker_timeout_s`` seconds for an item and
    ``worker_bytes`` bytes of address space.
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
    worker_timeout_s: float = 30.0
    worker_bytes: int = 1 << 30

"""Defines the keys of `modality` and of the data's columns with images and videos."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

# The generated tasks with images and videos; in the second, the control, each row has any row's.
SEE, SEE_EXCHANGED = SEE_TASKS = ("see", "see_exchanged")


@dataclass
class ModalityConfig:
    """Holds the keys of `modality`."""

    name: str = MISSING
    image_tokens: list[int] = MISSING
    source_pixels: int = MISSING
    video_fps: float = MISSING
    video_frames: list[int] = MISSING
    frame_tokens: int = MISSING
    item_mb: int = MISSING
    prompt_items: int = MISSING
    workers: int = MISSING
    worker_timeout_s: float = MISSING
    worker_mb: int = MISSING
    cache_mb: int = MISSING
    max_bad_in_a_row: int = MISSING


@dataclass
class MediaKeys:
    """Holds the keys of `data.media_keys`: the columns that have images and videos."""

    image: str | None = None
    video: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Returns the column of each kind that has one."""
        found = {"image": self.image, "video": self.video}
        return {kind: column for kind, column in found.items() if column is not None}

"""Defines the keys of `modality`, the data's columns with media, and the generated tasks that have media."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from relax_core.contracts.media import MediaKind


@dataclass(frozen=True, kw_only=True)
class MediaTask:
    """Says which ``kinds`` of media a generated task has; in a control, those ``exchanged`` are any row's."""

    kinds: tuple[MediaKind, ...]
    exchanged: tuple[MediaKind, ...] = ()


_SEEN: tuple[MediaKind, ...] = ("image", "video")
_HEARD: tuple[MediaKind, ...] = (*_SEEN, "audio")
_BOTH: tuple[MediaKind, ...] = ("image", "audio")
SEE, FOUR_MODALITIES, TONE_OF_PICTURE = "see", "four_modalities", "tone_of_picture"
MEDIA_TASKS = {
    SEE: MediaTask(kinds=_SEEN),
    f"{SEE}_exchanged": MediaTask(kinds=_SEEN, exchanged=_SEEN),
    FOUR_MODALITIES: MediaTask(kinds=_HEARD),
    **{f"{FOUR_MODALITIES}_{kind}_exchanged": MediaTask(kinds=_HEARD, exchanged=(kind,)) for kind in _HEARD},
    f"{FOUR_MODALITIES}_exchanged": MediaTask(kinds=_HEARD, exchanged=_HEARD),
    TONE_OF_PICTURE: MediaTask(kinds=_BOTH),
    **{f"{TONE_OF_PICTURE}_{kind}_exchanged": MediaTask(kinds=_BOTH, exchanged=(kind,)) for kind in _BOTH},
}


@dataclass
class ModalityConfig:
    """Holds the keys of `modality`."""

    name: str = MISSING
    image_tokens: list[int] = MISSING
    source_pixels: int = MISSING
    video_fps: float = MISSING
    video_frames: list[int] = MISSING
    frame_tokens: int = MISSING
    audio_seconds: list[float] = MISSING
    audio_in_video: bool = MISSING
    item_mb: int = MISSING
    prompt_items: int = MISSING
    workers: int = MISSING
    worker_timeout_s: float = MISSING
    worker_mb: int = MISSING
    cache_mb: int = MISSING
    max_bad_in_a_row: int = MISSING


@dataclass
class MediaKeys:
    """Holds the keys of `data.media_keys`: the columns that have images, videos and sounds."""

    image: str | None = None
    video: str | None = None
    audio: str | None = None

    @property
    def columns(self) -> dict[MediaKind, str]:
        """Returns the column of each kind that has one."""
        found: dict[MediaKind, str | None] = {"image": self.image, "video": self.video, "audio": self.audio}
        return {kind: column for kind, column in found.items() if column is not None}

"""The messages between an encode pool and its worker processes."""

from __future__ import annotations

import msgspec

from relax_core.contracts.media import MediaItem, MediaKind, MediaReason
from relax_core.data.media.media_limits import MediaLimits
from relax_core.families.architecture import AudioSettings, PatchSettings


class EncodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a worker needs: ``root`` is data.media_root, and ``folder`` is where it writes the items.

    ``tower`` and ``audio`` may be whole towers; only their settings are sent. ``audio`` is None for a model that does
    not hear. With ``audio_in_video`` a video is one item together with its sound.
    """

    model_folder: str
    tower: PatchSettings
    limits: MediaLimits
    root: str
    folder: str
    audio: AudioSettings | None = None
    audio_in_video: bool = False


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Names a source; its ``data_bytes`` bytes follow the message as they are if it has no path."""

    kind: MediaKind
    path: str | None
    data_bytes: int


class EncodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the item, or why there is none."""

    item: MediaItem | None = None
    word: MediaReason | None = None
    text: str = ""

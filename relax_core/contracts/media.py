"""Defines multimodal items (images, videos and sounds): their sources, their encoded form, and errors.

An item is encoded once. The result depends only on the item's source and the settings, not on the prompt around the
item. Trees, requests, rewards and environments contain `MediaItem` records without tensors; the tensors are in a file
that readers map into memory (`relax_core.contracts.media_file`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import msgspec

from relax_core.contracts.data import BadRow

if TYPE_CHECKING:
    import numpy as np  # not imported at run time: the registry imports this module also in processes without numpy

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)

BAD_MEDIA = "bad_media"
_MAX_SHOWN = 200  # characters of a path in an error
# The reasons why an item is refused. The ledger records the dropped prompt with "bad_media:" and one of these reasons.
MediaReason = Literal[
    "missing_file",
    "outside_root",
    "remote_refused",
    "too_many_bytes",
    "unknown_format",
    "truncated",
    "too_many_pixels",
    "bad_aspect",
    "animated",
    "no_frames",
    "too_many_frames",
    "too_long",
    "too_short",
    "not_finite",
    "bad_rate",
    "too_many_channels",
    "no_audio_track",
    "placeholder_count",
    "too_many_items",
    "too_many_tokens",
    "timeout",
    "worker_killed",
]
MEDIA_REASONS: tuple[MediaReason, ...] = get_args(MediaReason)


class MediaError(BadRow):
    """An image, video or sound cannot be used; only its prompt is dropped.

    ``kind`` is the item's kind, and ``word`` is one of `MEDIA_REASONS`. The text names the file and the error.
    """

    def __init__(self, kind: MediaKind, word: MediaReason, text: str) -> None:
        super().__init__(f"{BAD_MEDIA}:{word}", text)
        self.kind = kind
        self.word = word


class MediaSource(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an image, video or sound of a data row or environment by either ``path`` or ``data``.

    ``data`` is the content of the file, in any format that Relax decodes. ``path`` is absolute, or relative to
    data.media_root.
    """

    kind: MediaKind
    path: str | None = None
    data: bytes | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.data is None):
            raise ValueError(f"media of kind {self.kind} need a path or their bytes, and not both: give one of them.")

    def __repr__(self) -> str:
        return f"MediaSource({self.description})"

    @property
    def description(self) -> str:
        """Describes the source for errors and logs, without its content; the middle of a long path is cut."""
        if self.path is None:
            return f"{len(self.data or b'')} bytes of {self.kind}"
        half = _MAX_SHOWN // 2
        return self.path if len(self.path) <= _MAX_SHOWN else f"{self.path[:half]}…{self.path[-half:]}"


class MediaTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the location of one tensor in an item's file, in bytes from the file's first tensor byte."""

    name: str
    dtype: str  # a numpy name: "uint8", "float32"
    shape: list[int]
    offset: int
    nbytes: int


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an encoded image, video or sound, or a video together with its sound track.

    ``digest`` is the xxh3_128 hash of settings and tensors in hex; equal items have equal digests. ``token_ids`` are
    the token ids of the item's rows, int32 ``[rows]`` as little-endian bytes; a video's rows include its time stamps.
    ``offsets`` are the three rotary positions of each row relative to the item's first position, int32 ``[3, rows]``
    (float32 if ``fractional``). ``advance`` is the distance from the item's first position to the position of the token
    after the item. ``placeholder`` has the token ids that replace the item's rows in a request to an engine that
    expands items (computes their rows).

    ``grid`` is (time, height, width) in patches of the vision tower, zeros for a sound. ``seconds`` is the time in
    seconds between two time steps of the grid, 0 for an image. ``width`` and ``height`` are the source's size in
    pixels. ``frames`` is the number of image frames that Relax uses. ``audio_frames`` is the number of frames of audio
    features, and ``audio_seconds`` is the length of the sound.

    ``tensors`` lists the tensors in the item's file. They have ``nbytes`` bytes in total. The vision tensor is named
    ``frames``, uint8 ``[frames, height, width, 3]``. The audio tensor is named ``features``, float32 ``[mel bins,
    audio_frames]``. A video with its sound track has two tensors.
    """

    kind: MediaKind
    digest: str
    token_ids: bytes
    offsets: bytes
    advance: float
    fractional: bool = False
    placeholder: list[int]
    grid: list[int]
    seconds: float = 0.0
    frames: int = 1
    width: int
    height: int
    audio_frames: int = 0
    audio_seconds: float = 0.0
    tensors: list[MediaTensor] = []
    nbytes: int = 0

    @property
    def rows(self) -> int:
        """Returns the number of rows of the item."""
        return len(self.token_ids) // 4

    @property
    def patches(self) -> int:
        """Returns the number of patches for the vision tower."""
        time, height, width = self.grid
        return time * height * width

    @property
    def ids(self) -> np.ndarray:
        """Returns the token ids of the item's rows, int32 ``[rows]``."""
        import numpy as np

        return np.frombuffer(self.token_ids, dtype="<i4")

    @property
    def rotary_offsets(self) -> np.ndarray:
        """Returns the rotary offsets of the item's rows, ``[3, rows]``, int32 or float32."""
        import numpy as np

        return np.frombuffer(self.offsets, dtype="<f4" if self.fractional else "<i4").reshape(3, -1)

    @property
    def description(self) -> str:
        """Describes the item for logs and tables, such as "[image 333×201]" or "[audio 2.3 s]"."""
        if self.kind == "audio":
            return f"[audio {self.audio_seconds:.1f} s]"
        length = f", {self.frames} frames" if self.kind == "video" else ""
        length += f", {self.audio_seconds:.1f} s of sound" if self.audio_frames else ""
        return f"[{self.kind} {self.width}×{self.height}{length}]"


class Media(msgspec.Struct, frozen=True):
    """Places an item in a token tree or a prompt, at the rows ``start`` to ``end`` (exclusive)."""

    item: MediaItem
    start: int
    end: int


class MediaReader(Protocol):
    """Gives access to the tensors of items, for the trainer and the engines."""

    def fetch(self, items: Sequence[MediaItem]) -> None:
        """Waits until this node has the tensors of items; then `tensors` returns at once. Raises `MediaGone`."""

    def tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """Returns read-only views of an item's tensors by name. Raises `MediaGone` if the item is not stored."""


class MediaGone(ValueError):
    """The tensors of an item are not stored, because the reader's lease has ended or the item never had a reference."""


def short_form(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Replaces each item's rows in a prompt's token ids by the item's placeholder, for engines that expand items.

    The items in ``media`` are in order of rows and do not overlap.
    """
    short: list[int] = []
    done = 0
    for medium in media:
        short += token_ids[done : medium.start]
        short += medium.item.placeholder
        done = medium.end
    return short + list(token_ids[done:])

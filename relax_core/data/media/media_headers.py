"""Reads what an image or a video says about itself, without decoding it, so that a plan can count its rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.media.image_decoding import opened_image, upright_size
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_sizes import image_size, video_size
from relax_core.data.media.source_files import open_source
from relax_core.data.media.video_decoding import sample_frames, video_header
from relax_core.families.architecture import PatchSettings

STAMP_TOKENS = 10  # of a time stamp such as "<12.3 seconds>"; most tokenizers make 7 to 14 of it


@dataclass(frozen=True, kw_only=True)
class MediaHeader:
    """Describes a source by its header: size in pixels, and frames and seconds of the source, 1 and 0 for an image."""

    kind: MediaKind
    width: int
    height: int
    frames: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedItem:
    """Is what a source would become: rows in the tree, patches that pass the tower, bytes of its uint8 frames.

    ``source_pixels`` is the size of the source's image or frame before its resize.
    """

    kind: MediaKind
    rows: int
    patches: int
    nbytes: int
    source_pixels: int


def read_media_header(source: MediaSource, limits: MediaLimits, *, root: Path) -> MediaHeader:
    """Returns the header of a source. Raises MediaError as encoding it would, as far as headers show it.

    The rotation of a video is in its frames and not seen here: height and width of a phone's video may be exchanged.
    """
    try:
        opened = open_source(source, limits, root=root)
        with opened.file:
            if source.kind == "image":
                with opened_image(opened.file, opened.form, limits) as image:
                    height, width = upright_size(image)
                return MediaHeader(kind="image", height=height, width=width)
            said = video_header(opened.file, opened.form, limits)
            return MediaHeader(
                kind="video", height=said.height, width=said.width, frames=said.frames, seconds=said.seconds
            )
    except MediaError as error:
        raise MediaError(source.kind, error.word, f"{source.words}: {error}") from error


def planned_item(header: MediaHeader, tower: PatchSettings, limits: MediaLimits) -> PlannedItem:
    """Returns what encoding gives for a header; the rows of time stamps are counted as `STAMP_TOKENS` each.

    Raises MediaError for an item that has too many rows at its smallest size.
    """
    patch, merge, source_pixels = tower.patch_size, tower.merge_size, header.height * header.width
    if header.kind == "image":
        height, width = image_size(tower, limits, height=header.height, width=header.width)
        patches = height * width // patch**2
        return PlannedItem(
            kind=header.kind,
            rows=patches // merge**2,
            patches=patches,
            nbytes=3 * height * width,
            source_pixels=source_pixels,
        )
    frames = len(sample_frames(header.frames, header.frames / header.seconds, limits))
    frames = max(frames, tower.temporal_patch_size)
    height, width = video_size(tower, limits, frames=frames, height=header.height, width=header.width)
    steps = -(-frames // tower.temporal_patch_size)
    patches = height * width // patch**2
    rows = steps * (patches // merge**2 + 2 + STAMP_TOKENS)
    return PlannedItem(
        kind=header.kind,
        rows=rows,
        patches=steps * patches,
        nbytes=3 * frames * height * width,
        source_pixels=source_pixels,
    )

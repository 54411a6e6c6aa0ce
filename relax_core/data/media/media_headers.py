"""Reads the headers of media without decoding the media, so a memory plan can count rows and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.media.image_decoding import opened_image, upright_size
from relax_core.data.media.media_limits import MediaLimits, image_size, video_size
from relax_core.data.media.sound_decoding import sound_header
from relax_core.data.media.source_files import open_source
from relax_core.data.media.video_decoding import sample_frames, stamp_seconds, stamp_text, video_header
from relax_core.families.architecture import AudioSettings, PatchSettings

STAMP_TOKENS = 10  # tokens of a time stamp such as "<12.3 seconds>"; tokenizers give 7 to 14


@dataclass(frozen=True, kw_only=True)
class MediaHeader:
    """Describes a source by its header: size in pixels, number of frames, and seconds.

    An image has 1 frame and 0 seconds.

    ``audio_seconds`` is the length of the item's sound.
    """

    kind: MediaKind
    width: int = 0
    height: int = 0
    frames: int = 1
    seconds: float = 0.0
    audio_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedItem:
    """Holds the sizes of an item: rows in the tree, patches for the vision tower, bytes of its tensors.

    ``source_pixels`` is the size of the source's image or frame before its resize, and ``audio_frames`` is the number
    of feature frames for the audio tower.
    """

    kind: MediaKind
    rows: int
    patches: int
    nbytes: int
    source_pixels: int
    audio_frames: int = 0


def read_media_header(
    source: MediaSource, limits: MediaLimits, *, root: Path, audio_in_video: bool = False
) -> MediaHeader:
    """Returns the header of a source. Raises the same MediaError as encoding, if the header shows the problem.

    For a sound without a length in its header, the longest allowed length is returned. This function does not read the
    rotation of a video, which is stored in the frames. So height and width of a phone's video may be swapped.
    """
    try:
        opened = open_source(source, limits, root=root)
        with opened.file:
            if source.kind == "image":
                with opened_image(opened.file, opened.form, limits) as image:
                    height, width = upright_size(image)
                return MediaHeader(kind="image", height=height, width=width)
            heard = 0.0
            if source.kind == "audio" or audio_in_video:
                seconds = sound_header(opened.file, opened.form, limits).seconds
                heard = limits.audio_seconds_max if seconds is None else seconds
            if source.kind == "audio":
                return MediaHeader(kind="audio", audio_seconds=heard)
            said = video_header(opened.file, opened.form, limits)
            return MediaHeader(
                kind="video", height=said.height, width=said.width, frames=said.frames, seconds=said.seconds,
                audio_seconds=heard,
            )  # fmt: skip
    except MediaError as error:
        raise MediaError(source.kind, error.word, f"{source.description}: {error}") from error


def planned_item(
    header: MediaHeader,
    tower: PatchSettings,
    limits: MediaLimits,
    *,
    audio: AudioSettings | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> PlannedItem:
    """Returns the sizes of the item that the encoder will make from a source with this header.

    ``tokenize`` returns the token ids of a video's time stamps; without it each time stamp is assumed to have
    `STAMP_TOKENS` tokens. ``audio`` is needed for a header with sound. Raises MediaError for an item that has too many
    rows at its smallest size.
    """
    sound = _planned_sound(header, audio)
    if header.kind == "audio":
        return sound
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
    fps = header.frames / header.seconds
    indices = sample_frames(header.frames, fps, limits)
    frames = max(len(indices), tower.temporal_patch_size)
    height, width = video_size(tower, limits, frames=frames, height=header.height, width=header.width)
    steps = -(-frames // tower.temporal_patch_size)
    patches = height * width // patch**2
    rows = steps * (patches // merge**2)
    if tower.positions_per_second is None:
        stamps = [stamp_text(at) for at in stamp_seconds(indices, fps, tower.temporal_patch_size)]
        rows += sum(2 + (STAMP_TOKENS if tokenize is None else len(tokenize(stamp))) for stamp in stamps)
    around = 2 if sound.rows else 0  # the tokens that begin and end the sound
    return PlannedItem(
        kind=header.kind,
        rows=rows + sound.rows + around,
        patches=steps * patches,
        nbytes=3 * frames * height * width + sound.nbytes,
        source_pixels=source_pixels,
        audio_frames=sound.audio_frames,
    )


def _planned_sound(header: MediaHeader, audio: AudioSettings | None) -> PlannedItem:
    if not header.audio_seconds:
        return PlannedItem(kind="audio", rows=0, patches=0, nbytes=0, source_pixels=0)
    assert audio is not None, "a header has sound only for a model with audio input"
    frames = audio.frames_of_seconds(header.audio_seconds)
    rows, nbytes = audio.rows_of_frames(frames), 4 * audio.mel_bins * frames
    return PlannedItem(kind="audio", rows=rows, patches=0, nbytes=nbytes, source_pixels=0, audio_frames=frames)

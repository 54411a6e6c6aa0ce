"""Encodes one image, video or sound into a media item, which has rows, offsets, uint8 frames and audio features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

from relax_core.contracts.media import MediaError, MediaItem, MediaKind, MediaSource
from relax_core.contracts.media_file import item_digest
from relax_core.data.media.image_decoding import decoded_image, opened_image, resized, upright_size
from relax_core.data.media.media_limits import MediaLimits, image_size, video_size
from relax_core.data.media.sound_decoding import clip_features
from relax_core.data.media.source_files import open_source
from relax_core.data.media.video_decoding import (
    decode_frames,
    sample_frames,
    stamp_seconds,
    stamp_text,
    step_seconds,
    video_index,
)
from relax_core.families.architecture import AudioSettings, PatchSettings
from relax_core.families.audio_tower import clip_rows, video_with_sound_rows
from relax_core.families.vision_tower import ItemRows, image_rows, timed_video_rows, video_rows

Tokenize = Callable[[str], Sequence[int]]
Encoded = tuple[MediaItem, dict[str, np.ndarray]]
_FORMAT = 2  # version in the digest; increase it when the same source and settings give a different item


class Sound(NamedTuple):
    """Holds the sound of a video: features float32 ``[mel bins, frames]``, and its length in seconds."""

    audio: AudioSettings
    features: np.ndarray
    seconds: float


def encode_item(
    source: MediaSource,
    tower: PatchSettings,
    limits: MediaLimits,
    *,
    root: Path,
    tokenize: Tokenize,
    audio: AudioSettings | None = None,
    audio_in_video: bool = False,
) -> Encoded:
    """Returns the item of a source and its tensors (`relax_core.contracts.media.MediaItem`).

    ``tokenize`` returns the token ids of a video's time stamps. ``audio`` is needed for sounds. With ``audio_in_video``
    it is also needed for videos, because a video and its sound track then become one item. Sources with the same
    pixels, times and sounds have the same digest. Raises MediaError, with a text that begins with the name of the
    source.
    """
    try:
        opened = open_source(source, limits, root=root)
        with opened.file:
            if source.kind == "image":
                return _encode_image(opened.file, opened.form, tower, limits)
            if source.kind == "video":
                heard = audio if audio_in_video else None
                return _encode_video(opened.file, opened.form, tower, limits, tokenize=tokenize, audio=heard)
            assert audio is not None, "the checks before the start refuse sounds for a family without audio input"
            return clip_item(audio, *clip_features(opened.file, opened.form, audio, limits))
    except MediaError as error:
        raise MediaError(source.kind, error.word, f"{source.description}: {error}") from error


def _encode_image(file: IO[bytes], form: str, tower: PatchSettings, limits: MediaLimits) -> Encoded:
    with opened_image(file, form, limits) as image:
        height, width = upright_size(image)
        size = image_size(tower, limits, height=height, width=width)
        pixels = resized(decoded_image(image, file), height=size[0], width=size[1])
    return image_item(tower, pixels, height=height, width=width)


def _encode_video(
    file: IO[bytes],
    form: str,
    tower: PatchSettings,
    limits: MediaLimits,
    *,
    tokenize: Tokenize,
    audio: AudioSettings | None,
) -> Encoded:
    from PIL import Image

    sound = None
    if audio is not None:
        features, seconds = clip_features(file, form, audio, limits)
        sound = Sound(audio, features, seconds)
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
    return video_item(tower, frames, indices, fps=fps, height=height, width=width, tokenize=tokenize, sound=sound)


def clip_item(audio: AudioSettings, features: np.ndarray, seconds: float) -> Encoded:
    """Returns the item of a sound with these features, float32 ``[mel bins, frames]``.

    ``seconds`` is the sound's length.
    """
    frames = features.shape[1]
    item = _item(clip_rows(audio, frames=frames), kind="audio", grid=[0, 0, 0], height=0, width=0)
    item = msgspec.structs.replace(item, frames=0, audio_frames=frames, audio_seconds=seconds)
    return _with_digest(item, {"features": features}, _sound_settings(audio))


def image_item(tower: PatchSettings, pixels: np.ndarray, *, height: int, width: int) -> Encoded:
    """Returns the item of a resized image, uint8 ``[height, width, 3]``; the keywords are the size of the source."""
    grid = [1, pixels.shape[0] // tower.patch_size, pixels.shape[1] // tower.patch_size]
    item = _item(image_rows(tower, grid=grid), kind="image", grid=grid, height=height, width=width)
    return _with_digest(item, {"frames": pixels[None]}, _pixel_settings(tower))


def video_item(
    tower: PatchSettings,
    frames: np.ndarray,
    indices: Sequence[int],
    *,
    fps: float,
    height: int,
    width: int,
    tokenize: Tokenize,
    sound: Sound | None = None,
) -> Encoded:
    """Returns the item of a video's resized frames, uint8 ``[frames, height, width, 3]``, and of its sound.

    ``indices`` are the numbers of these frames in the source. The source has ``fps`` frames per second and frames of
    the given size.
    """
    seconds = stamp_seconds(indices, fps, tower.temporal_patch_size)
    grid = [len(seconds), frames.shape[1] // tower.patch_size, frames.shape[2] // tower.patch_size]
    between = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 0.0
    tensors, settings = {"frames": frames}, _pixel_settings(tower)
    if tower.positions_per_second is None:
        rows = video_rows(tower, grid=grid, stamps=[tokenize(stamp_text(at)) for at in seconds])
    else:
        between = step_seconds(indices, fps, tower.temporal_patch_size)
        rows = timed_video_rows(tower, grid=grid, seconds=between)
    if sound is not None:
        count = sound.features.shape[1]
        rows = video_with_sound_rows(tower, sound.audio, grid=grid, seconds=between, frames=count)
        tensors["features"] = sound.features
        settings += _sound_settings(sound.audio)
    item = _item(rows, kind="video", grid=grid, height=height, width=width)
    item = msgspec.structs.replace(item, seconds=between, frames=len(indices))
    if sound is not None:
        item = msgspec.structs.replace(item, audio_frames=count, audio_seconds=sound.seconds)
    return _with_digest(item, tensors, settings)


def _item(rows: ItemRows, *, kind: MediaKind, grid: list[int], height: int, width: int) -> MediaItem:
    fractional = bool((rows.offsets % 1).any()) or rows.advance % 1 != 0
    return MediaItem(
        kind=kind,
        digest="",
        token_ids=rows.token_ids.astype("<i4").tobytes(),
        offsets=rows.offsets.astype("<f4" if fractional else "<i4").tobytes(),
        advance=rows.advance,
        fractional=fractional,
        placeholder=rows.placeholder,
        grid=grid,
        height=height,
        width=width,
    )


def _pixel_settings(tower: PatchSettings) -> tuple[object, ...]:
    return (tower.patch_size, tower.temporal_patch_size, tower.merge_size, tower.mean, tower.std)


def _sound_settings(audio: AudioSettings) -> tuple[object, ...]:
    return (audio.sampling_rate, audio.fft_size, audio.hop_length, audio.chunk_frames)


def _with_digest(item: MediaItem, tensors: Mapping[str, np.ndarray], settings: tuple[object, ...]) -> Encoded:
    """Returns the item with the digest of its record, settings and tensors."""
    record = msgspec.msgpack.encode((_FORMAT, item, settings))
    return msgspec.structs.replace(item, digest=item_digest(record, tensors)), dict(tensors)

"""Decodes the first sound track of an MP4, QuickTime, Matroska or WebM file with PyAV."""

from __future__ import annotations

import re
from typing import IO, Any

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.audio.sound_limits import PACKET, SoundHeader, check_sound, most_samples, without_padding
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.video_decoding import opened_container

# What phones, cameras, browsers and data sets write, beside uncompressed samples (pcm_*).
_CODECS = ("aac", "mp3", "mp3float", "opus", "libopus", "vorbis", "flac", "alac", "ac3", "eac3")
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_ROUNDING_S = 0.1  # that a track may be shorter than its header says; encoders count whole packets


def track_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns the header of a container's sound. Raises MediaError if there is none or if it breaks a limit."""
    with opened_container(file, form, limits) as container:
        return _header(_track(container), limits)


def decode_track(file: IO[bytes], form: str, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Returns the mean of a track's channels, float32 ``[samples]`` of full scale 1, and its samples a second.

    The padding of the last packet, behind the track's length, is left out.
    """
    import av

    blocks, count = [np.zeros(0, np.float32)], 0
    with opened_container(file, form, limits) as container:
        track = _track(container)
        header = _header(track, limits)
        track.codec_context.thread_count = 1
        most = most_samples(header.rate, limits) + PACKET
        planar = av.AudioResampler(format="fltp")  # it raises ValueError if rate or channels change
        for frame in container.decode(track):
            if frame.is_corrupt or frame.sample_rate != header.rate:
                raise MediaError("audio", "truncated", "its sound is damaged.")
            for part in planar.resample(frame):
                blocks.append(part.to_ndarray().mean(axis=0, dtype=np.float32))
                count += len(blocks[-1])
            if count > most:
                break
    if header.seconds is not None and count < (header.seconds - _ROUNDING_S) * 0.99 * header.rate:
        told = f"its header says {header.seconds:.2f} s of sound, and {count / header.rate:.2f} s are there."
        raise MediaError("audio", "truncated", told)
    length = round((limits.audio_seconds_max if header.seconds is None else header.seconds) * header.rate)
    return without_padding(np.concatenate(blocks), length), header.rate


def _track(container: Any) -> Any:
    if not container.streams.audio:
        raise MediaError("audio", "no_audio_track", "it has no sound track.")
    return container.streams.audio[0]


def _header(track: Any, limits: MediaLimits) -> SoundHeader:
    context = track.codec_context
    if context is None or not (context.name in _CODECS or context.name.startswith("pcm_")):
        name = "of an unknown codec" if context is None else context.name
        told = f"its sound is {name}, none of {', '.join(_CODECS)} and pcm. Convert it."
        raise MediaError("audio", "unknown_format", told)
    rate, seconds, most = context.sample_rate or 0, _seconds(track), limits.audio_seconds_max
    if seconds is not None and rate and most < seconds <= most + PACKET / rate:
        seconds = most  # Matroska counts the padding of the last packet, too
    header = SoundHeader(rate=rate, channels=context.channels or 0, seconds=seconds)
    check_sound(header, limits)
    return header


def _seconds(track: Any) -> float | None:
    """Returns the length of a track, None if only the length of the whole container is known."""
    if track.duration is not None and track.time_base:
        return float(track.duration * track.time_base)
    said = _CLOCK.match(track.metadata.get("DURATION", ""))  # where FFmpeg writes it in Matroska
    return None if said is None else int(said[1]) * 3600 + int(said[2]) * 60 + float(said[3])

"""Decodes WAV, FLAC, Ogg and MP3 files with libsndfile: bounded by their header and while they are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.audio.sound_headers import readable_file, written_header
from relax_core.data.media.audio.sound_limits import PACKET, SoundHeader, check_sound, most_samples, without_padding
from relax_core.data.media.media_limits import MediaLimits

# What libsndfile must find in a file whose first bytes show the format.
_FOUND = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3",)}
_BLOCK = 1 << 16  # samples that are decoded at a time
_UNKNOWN_LENGTH = 1 << 40  # libsndfile says more samples than this if a file does not say how many it has


def file_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns the header of a sound. Raises MediaError if it breaks a limit."""
    written = written_header(file, form)
    if written is not None:
        check_sound(written, limits)
    with _opened(file, form) as sound:
        header = _header(sound)
    check_sound(header, limits)
    return header


def decode_file(file: IO[bytes], form: str, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Returns the mean of a sound's channels, float32 ``[samples]`` of full scale 1, and its samples a second."""
    header = file_header(file, form, limits)
    is_padded = form == "MP3" and header.seconds is None  # a count of the frames tells the padding, too
    most = most_samples(header.rate, limits) + (PACKET if is_padded else 0)
    blocks, count = [np.zeros(0, np.float32)], 0
    with _opened(file, form) as sound:
        while count <= most:
            block = sound.read(_BLOCK, dtype="float32", always_2d=True)
            if not len(block):
                break
            blocks.append(block.mean(axis=1, dtype=np.float32))
            count += len(block)
    if header.seconds is not None and count < round(header.seconds * header.rate):
        said = round(header.seconds * header.rate)
        told = f"it is truncated or damaged: its header says {said:,} samples, and {count:,} are there."
        raise MediaError("audio", "truncated", told)
    samples = np.concatenate(blocks)
    if is_padded:
        samples = without_padding(samples, round(limits.audio_seconds_max * header.rate))
    return samples, header.rate


def _header(sound: Any) -> SoundHeader:
    known = 0 <= sound.frames < _UNKNOWN_LENGTH
    return SoundHeader(
        rate=sound.samplerate, channels=sound.channels, seconds=sound.frames / sound.samplerate if known else None
    )


@contextmanager
def _opened(file: IO[bytes], form: str) -> Iterator[Any]:
    """Opens a sound, to be read in order; errors of libsndfile inside the block become MediaError."""
    import soundfile

    try:
        with soundfile.SoundFile(readable_file(file, form)) as sound:
            sound.seekable = lambda: False  # it seeks behind each block, which fails at the end of a FLAC from a pipe
            if sound.format not in _FOUND[form]:
                told = f"its content is {sound.format} and not {form}. Convert it."
                raise MediaError("audio", "unknown_format", told)
            yield sound
    except soundfile.LibsndfileError as error:
        raise MediaError("audio", "truncated", f"it is truncated or damaged: {error.error_string}") from error

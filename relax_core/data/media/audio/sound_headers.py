"""Reads the headers of WAV, FLAC and Ogg files, and finds files that are cut, which libsndfile may only shorten."""

from __future__ import annotations

import struct
from typing import IO

from relax_core.contracts.media import MediaError
from relax_core.data.media.audio.sound_limits import SoundHeader

# What programs that write a WAV into a pipe put as the size of its samples: SoX, FFmpeg and others.
_UNKNOWN = frozenset({0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDB, 0xFFFFFFFF})
_SMALLEST_UNKNOWN = min(_UNKNOWN)
_EVEN = (1, 3, 6, 7, 0xFFFE)  # the codes of a WAV whose samples have one size: PCM, floats, A-law, mu-law, extensible
_MOST_CHUNKS = 1_000  # before a WAV's samples
_OGG_END = 4  # the flag of a page that ends its stream


def written_header(file: IO[bytes], form: str) -> SoundHeader | None:
    """Returns the header of a WAV or FLAC file, None for other formats; an Ogg file is only looked through.

    Raises MediaError for a file that is not complete. The file stays at its begin.
    """
    try:
        file.seek(0)
        if form == "WAV":
            return _wav_header(file)
        if form == "FLAC":
            return _flac_header(file)
        if form == "OGG":
            _check_pages(file)
        return None
    except struct.error as error:
        raise _cut("its header is not complete.") from error
    finally:
        file.seek(0)


def _wav_header(file: IO[bytes]) -> SoundHeader:
    size = file.seek(0, 2)
    file.seek(4)
    (whole,) = struct.unpack("<I", file.read(4))
    file.seek(12)
    code = channels = rate = block = 0
    for _ in range(_MOST_CHUNKS):
        name, length = struct.unpack("<4sI", file.read(8))
        behind = file.tell() + length + length % 2
        if name == b"data":
            break
        if name == b"fmt ":
            code, channels, rate, _, block = struct.unpack("<HHIIH", file.read(14))
        file.seek(behind)
    else:
        raise _cut("it has no samples.")
    left = size - file.tell()
    never_written = length == 0 and (whole >= _SMALLEST_UNKNOWN or whole + 8 <= file.tell())
    if length in _UNKNOWN or never_written:
        length = left
    if length > left:
        raise _cut(f"its header says {length:,} bytes of samples, and {left:,} are there.")
    known = code in _EVEN and rate > 0 and block > 0
    return SoundHeader(rate=rate, channels=channels, seconds=min(length, left) / block / rate if known else None)


def _flac_header(file: IO[bytes]) -> SoundHeader:
    head = file.read(26)
    if len(head) < 26 or head[4] & 0x7F != 0:
        raise _cut("its header is not complete.")
    bits = int.from_bytes(head[18:26], "big")  # rate: 20 bits, channels - 1: 3, bits - 1: 5, samples: 36
    rate, channels, samples = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    return SoundHeader(rate=rate, channels=channels, seconds=samples / rate if rate and samples else None)


def _check_pages(file: IO[bytes]) -> None:
    """Raises MediaError if the last page of an Ogg file is cut or does not end its stream."""
    size, at, flags = file.seek(0, 2), 0, 0
    while at < size:
        file.seek(at)
        head = file.read(27)
        if head[:4] != b"OggS" and at > 0:
            break  # what follows the last page is no sound
        (flags, count) = struct.unpack_from("<5xB20xB", head)
        at += 27 + count + sum(file.read(count))
    if at > size or not flags & _OGG_END:
        raise _cut("its last page is missing.")


def _cut(text: str) -> MediaError:
    return MediaError("audio", "truncated", f"it is truncated or damaged: {text}")

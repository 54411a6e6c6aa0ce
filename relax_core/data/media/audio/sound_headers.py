"""Reads the headers of sound files, and finds files that are cut, which libsndfile may only shorten.

`readable_file` gives libsndfile a file that it reads to its end, although a header lacks the length.
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any, NamedTuple

from relax_core.contracts.media import MediaError
from relax_core.data.media.audio.sound_limits import SoundHeader

# What programs that write a WAV into a pipe put as the size of its samples: SoX, FFmpeg and others.
_UNKNOWN = frozenset({0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDB, 0xFFFFFFFF})
_SMALLEST_UNKNOWN = min(_UNKNOWN)
_EVEN = (1, 3, 6, 7, 0xFFFE)  # the codes of a WAV whose samples have one size: PCM, floats, A-law, mu-law, extensible
_MOST_CHUNKS = 1_000  # before a WAV's samples
_OGG_END = 4  # the flag of a page that ends its stream
_FIRST_FRAME = 192  # bytes of an MP3's first frame that hold the count of the frames, if there is one
_END = 1 << 45  # the size that an MP3 without such a count seems to have


class _WavData(NamedTuple):
    """Holds a WAV's header, and where the ``size`` of its samples stands; the file says ``said`` there."""

    header: SoundHeader
    at: int
    size: int
    said: int


def written_header(file: IO[bytes], form: str) -> SoundHeader | None:
    """Returns the header of a WAV or FLAC file, None for other formats; an Ogg file is only looked through.

    Raises MediaError for a file that is not complete. The file stays at its begin.
    """
    try:
        file.seek(0)
        if form == "WAV":
            return _wav_data(file).header
        if form == "FLAC":
            return _flac_header(file)
        if form == "OGG":
            _check_pages(file)
        return None
    except struct.error as error:
        raise _cut("its header is not complete.") from error
    finally:
        file.seek(0)


def readable_file(file: IO[bytes], form: str) -> Any:
    """Returns a file object that libsndfile reads to the end of the sound, at its begin.

    It takes the size 0 of a WAV from a pipe for no samples. The length of an MP3 without a count of its frames it
    guesses from the size of the file and the first frame, and it stops there, so a variable bit rate loses its end.
    The file must have passed `written_header`.
    """
    file.seek(0)
    if form == "WAV":
        found = _wav_data(file)
        file.seek(0)
        if found.said == 0 < found.size:
            data = bytearray(file.read())
            data[found.at : found.at + 4] = struct.pack("<I", found.size)
            return io.BytesIO(data)
    if form == "MP3":
        is_counted = _counts_frames(file)
        file.seek(0)
        if not is_counted:
            return _Endless(file)
    return file


class _Endless:
    """Reads a file whose end seems to be far behind its bytes, so that no length is guessed from its size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._behind: int | None = None  # a place near the seeming end

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._behind = _END + offset if whence == io.SEEK_END else None
        return self._file.seek(offset, whence) if self._behind is None else self._behind

    def tell(self) -> int:
        return self._file.tell() if self._behind is None else self._behind

    def read(self, count: int) -> bytes:
        return self._file.read(count) if self._behind is None else bytes(count)


def _counts_frames(file: IO[bytes]) -> bool:
    """Returns whether the first frame of an MP3, behind an ID3 tag, holds the number of its frames."""
    head = file.read(10)
    at = 0
    if head[:3] == b"ID3" and len(head) == 10:
        at = 10 + sum((byte & 0x7F) << 7 * (3 - place) for place, byte in enumerate(head[6:]))
    file.seek(at)
    frame = file.read(_FIRST_FRAME)
    for mark in (b"Xing", b"Info"):
        place = frame.find(mark)
        if place >= 0:
            return bool(frame[place + 7 : place + 8] and frame[place + 7] & 1)
    return b"VBRI" in frame


def _wav_data(file: IO[bytes]) -> _WavData:
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
    left, said = size - file.tell(), length
    never_written = length == 0 and (whole >= _SMALLEST_UNKNOWN or whole + 8 <= file.tell())
    if length in _UNKNOWN or never_written:
        length = left
    if length > left:
        raise _cut(f"its header says {length:,} bytes of samples, and {left:,} are there.")
    known = code in _EVEN and rate > 0 and block > 0
    header = SoundHeader(rate=rate, channels=channels, seconds=length / block / rate if known else None)
    return _WavData(header, at=size - left - 4, size=length, said=said)


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

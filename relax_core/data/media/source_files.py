"""Opens media sources: regular files below the media root, within the size limit, of a known format.

Decoders get open files and never paths. If FFmpeg opens a file by path, it also opens other files of the machine that
the file names.
"""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path
from typing import IO, NamedTuple

from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.media.media_limits import MediaLimits

# A URL scheme before "://", or a scheme that FFmpeg, Pillow or a browser opens without "//".
_REMOTE = re.compile(
    r"[a-z][a-z0-9+.-]*://|(?:https?|ftps?|file|data|concat|subfile|pipe|cache|crypto):", re.IGNORECASE
)
_HEAD_BYTES = 32


class OpenSource(NamedTuple):
    """Holds an open file and its format, one of the `FORMATS` of its kind of media; the caller closes the file."""

    file: IO[bytes]
    form: str


IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
VIDEO_FORMATS = ("mov", "matroska")  # FFmpeg's names: MP4 and QuickTime; Matroska and WebM
FORMATS: dict[MediaKind, tuple[str, ...]] = {
    "image": IMAGE_FORMATS,
    "video": VIDEO_FORMATS,
    "audio": ("WAV", "FLAC", "OGG", "MP3", *VIDEO_FORMATS),
}
_KNOWN: dict[MediaKind, str] = {
    "image": "PNG, JPEG, WebP, BMP and GIF",
    "video": "MP4, QuickTime, Matroska and WebM",
    "audio": "WAV, FLAC, Ogg, MP3, MP4, QuickTime, Matroska and WebM",
}


def open_source(source: MediaSource, limits: MediaLimits, *, root: Path) -> OpenSource:
    """Opens the file of a source, or a file object for its bytes, and determines the format from the first bytes.

    Raises MediaError for a path that cannot or must not be opened, and for content of a wrong kind or unknown format.
    """
    if source.data is not None:
        _check_bytes(source.kind, len(source.data), limits)
        file: IO[bytes] = io.BytesIO(source.data)
    else:
        assert source.path is not None, "a source has a path or bytes"
        file = _open_path(source.kind, source.path, limits, root=root)
    try:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        return OpenSource(file, _format_of(source.kind, head))
    except BaseException:
        file.close()
        raise


def _open_path(kind: MediaKind, path: str, limits: MediaLimits, *, root: Path) -> IO[bytes]:
    if _REMOTE.match(path):
        raise MediaError(kind, "remote_refused", "only files below data.media_root are read. Download it first.")
    try:
        real = os.path.realpath(root / path, strict=True)
        _check_place(kind, real, root)
        if not stat.S_ISREG(os.stat(real).st_mode):
            raise MediaError(kind, "unknown_format", f"{real} is not a regular file.")
        # If another process replaced the path after the check, these flags prevent a blocking open and an open through
        # a link.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, MediaError):
            raise
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaError(kind, "missing_file", f"{message} (data.media_root is {root}).") from error
    file = os.fdopen(descriptor, "rb")
    try:
        found = os.fstat(descriptor)
        _check_place(kind, os.readlink(f"/proc/self/fd/{descriptor}"), root)
        if not stat.S_ISREG(found.st_mode):
            raise MediaError(kind, "unknown_format", f"{real} is not a regular file.")
        _check_bytes(kind, found.st_size, limits)
    except BaseException:
        file.close()
        raise
    return file


def _check_place(kind: MediaKind, real: str, root: Path) -> None:
    top = os.path.realpath(root)
    if os.path.commonpath([top, real]) != top:
        raise MediaError(kind, "outside_root", f"it is {real}, which is not below data.media_root={top}.")


def _check_bytes(kind: MediaKind, size: int, limits: MediaLimits) -> None:
    if size > limits.item_bytes:
        raise MediaError(kind, "too_many_bytes", f"it has {size:,} bytes, and the limit is {limits.item_bytes:,}.")


def _format_of(kind: MediaKind, head: bytes) -> str:
    """Returns the format that the first bytes show. Raises MediaError if it is not a format of ``kind``."""
    if not head:
        raise MediaError(kind, "truncated", "the file is empty.")
    form = sniffed_format(head)
    if form in FORMATS[kind]:
        return form
    if form:
        raise MediaError(kind, "unknown_format", f"it is no {kind}: its content is {form}.")
    raise MediaError(kind, "unknown_format", f"its content is none of {_KNOWN[kind]}. Convert it.")


def sniffed_format(head: bytes) -> str:
    """Returns the format that a file's first 32 bytes show; empty for an unknown format."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "WAV"
    if head.startswith(b"fLaC"):
        return "FLAC"
    if head.startswith(b"OggS"):
        return "OGG"
    if head.startswith(b"ID3") or _is_mp3_frame(head):
        return "MP3"
    if head.startswith(b"BM"):
        return "BMP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    return "matroska" if head.startswith(b"\x1a\x45\xdf\xa3") else ""


def _is_mp3_frame(head: bytes) -> bool:
    """Returns whether bytes begin a frame of MPEG audio, layer 3: eleven set bits, then three valid fields."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return False
    return head[1] & 0x18 != 0x08 and head[2] & 0xF0 not in (0x00, 0xF0) and head[2] & 0x0C != 0x0C

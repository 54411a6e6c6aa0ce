"""Finds complete images that have fewer rows than their header says; Pillow fills the others without an error.

Libjpeg fills them with grey, and in a PNG they stay 0. So only an image that ends so is looked through once more.
"""

from __future__ import annotations

import struct
import zlib
from typing import IO, TYPE_CHECKING

import numpy as np

from relax_core.contracts.media import MediaError

if TYPE_CHECKING:
    from PIL import Image

_GREY = 128  # Libjpeg fills in this level, also for each of four inks, where it may be inverted.
_END = 4  # pixels at the end of a JPEG's last row, which are filled in if any are
_BLOCK = 1 << 14  # bytes that are unpacked at a time, into at most 1,032 times as many
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG's colour types
# The first column and row of each pass of an interlaced PNG, and its steps (W3C PNG, third edition, 8.2).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def check_all_rows(image: Image.Image, file: IO[bytes]) -> None:
    """Raises MediaError if a decoded PNG or JPEG has not all the rows of its header; ``file`` is what it was read from.

    The call comes before the image is changed.
    """
    if image.format not in ("PNG", "JPEG", "MPO"):
        return
    width, height = image.size
    if image.format == "PNG":  # Of an interlaced one, each pass fills every second row or less.
        suspicious = any(not row.any() for row in np.asarray(image.crop((0, max(0, height - 2), width, height))))
    else:
        end = np.asarray(image.crop((max(0, width - _END), height - 1, width, height)))
        suspicious = bool((abs(end.astype(int) - _GREY) <= 1).all())
    if not suspicious:
        return
    file.seek(0)
    data = file.read()
    whole = _has_all_bytes(data) if image.format == "PNG" else _decodes_whole(data)
    if not whole:
        raise MediaError("image", "truncated", f"it has fewer rows than the {image.height} of its header.")


def _has_all_bytes(data: bytes) -> bool:
    """Returns whether the pixels of a PNG unpack to as many bytes as its header says."""
    width, height, bits, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    missing = sum(
        rows * (1 + -(-columns * bits * _CHANNELS[colour] // 8))
        for columns, rows in (_pass_sizes(width, height) if interlaced else [(width, height)])
    )
    at, unpack = 8, zlib.decompressobj()
    while missing > 0 and at + 8 <= len(data) and not unpack.eof:
        length, name = struct.unpack_from(">I4s", data, at)
        packed = data[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        for start in range(0, len(packed), _BLOCK):
            if missing > 0 and not unpack.eof:
                missing -= len(unpack.decompress(packed[start : start + _BLOCK]))
        at += 12 + length
    return missing <= 0


def _pass_sizes(width: int, height: int) -> list[tuple[int, int]]:
    """Returns columns and rows of each pass of an interlaced PNG that is not empty."""
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in _PASSES]
    return [(columns, rows) for columns, rows in sizes if columns > 0 and rows > 0]


def _decodes_whole(data: bytes) -> bool:
    """Returns whether FFmpeg, which unlike libjpeg stops at missing data, decodes a JPEG."""
    import av

    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    decoder.thread_count = 1
    try:
        return bool(decoder.decode(av.Packet(data)) + decoder.decode(None))
    except av.FFmpegError:
        return False

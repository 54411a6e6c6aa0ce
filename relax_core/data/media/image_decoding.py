"""Decodes still images with Pillow to upright 8-bit RGB on white, and checks their size and completeness.

Pillow fills missing rows without an error: with grey in a JPEG (by libjpeg), with 0 in a PNG. Therefore an image with
such rows at its end is checked a second time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.media_limits import MediaLimits, check_source_size

if TYPE_CHECKING:
    from PIL import Image


_GREY = 128  # libjpeg's fill value in each channel, also in CMYK images, inverted or not
_END = 4  # pixels at the end of a JPEG's last row, which every truncation loses
_BLOCK = 1 << 14  # compressed bytes per step; they unpack to at most 1,032 times their size
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # PNG colour type → channels
# The first column and row of each pass of an interlaced PNG, and its steps (W3C PNG, third edition, 8.2).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def check_all_rows(image: Image.Image, file: IO[bytes]) -> None:
    """Raises MediaError if a decoded PNG or JPEG has fewer rows than its header states; ``file`` is the image's file.

    Call this function before the image is changed.
    """
    if image.format not in ("PNG", "JPEG", "MPO"):
        return
    width, height = image.size
    if image.format == "PNG":  # In an interlaced PNG, each pass fills at most every second row.
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
        raise MediaError("image", "truncated", f"it has fewer rows than its header states ({image.height}).")


def _has_all_bytes(data: bytes) -> bool:
    """Returns whether the pixels of a PNG unpack to the number of bytes that its header implies."""
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
    """Returns the number of columns and rows of each non-empty pass of an interlaced PNG."""
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in _PASSES]
    return [(columns, rows) for columns, rows in sizes if columns > 0 and rows > 0]


def _decodes_whole(data: bytes) -> bool:
    """Returns whether FFmpeg decodes a JPEG completely; FFmpeg stops at missing data, and libjpeg does not."""
    import av

    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    decoder.thread_count = 1
    try:
        return bool(decoder.decode(av.Packet(data)) + decoder.decode(None))
    except av.FFmpegError:
        return False


_UPRIGHT = 1
_ORIENTATION = 0x0112  # the EXIF tag of the rotation
_MAY_MOVE = ("GIF", "PNG", "WEBP")


@contextmanager
def opened_image(file: IO[bytes], form: str, limits: MediaLimits) -> Iterator[Image.Image]:
    """Opens an image and reads only its header. Raises MediaError if the header breaks a limit."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # Relax checks a limit below; Pillow's limit only warns up to twice its value
    if form == "WEBP":
        _check_canvas(file, limits)  # checked first, because Pillow allocates a WebP's canvas when it opens the file
    with _refused_if_damaged():
        image = Image.open(file, formats=[form])
    with image:
        check_source_size("image", limits, height=image.height, width=image.width)
        with _refused_if_damaged():
            moves = form in _MAY_MOVE and getattr(image, "is_animated", False)
        if moves:
            raise MediaError("image", "animated", "it has more than one frame. Give one frame, or a video.")
        yield image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Returns height and width of an opened image after the rotation in its EXIF data."""
    with _refused_if_damaged():
        turned = image.getexif().get(_ORIENTATION, _UPRIGHT) in (5, 6, 7, 8)
    return (image.width, image.height) if turned else (image.height, image.width)


def decoded_image(image: Image.Image, file: IO[bytes]) -> Image.Image:
    """Returns the upright pixels of an image opened from ``file``, as 8-bit RGB; transparent pixels become white.

    Raises MediaError for an image that is truncated or damaged.
    """
    from PIL import ImageOps

    with _refused_if_damaged():
        image.load()
        check_all_rows(image, file)
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def resized(image: Image.Image, *, height: int, width: int) -> np.ndarray:
    """Returns the pixels of an RGB image after a bicubic resize, uint8 ``[height, width, 3]``."""
    from PIL import Image

    if (image.width, image.height) != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        return _from_16_bits(image)
    if image.mode not in ("RGBA", "LA", "PA", "RGBa", "La") and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGB", layered.size, (255, 255, 255))
    white.paste(layered, mask=layered.getchannel("A"))
    return white


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Converts a 16-bit grey image to RGB from the upper byte of each value, as Pillow does for 16-bit colours."""
    from PIL import Image

    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")


@contextmanager
def _refused_if_damaged() -> Iterator[None]:
    try:
        yield
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # for malformed bytes, the decoders may raise any exception
        if "MAX_TEXT" in str(error):
            raise MediaError("image", "too_many_bytes", f"a compressed text in it is too large: {error}") from error
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MediaError("image", "truncated", f"it is truncated or damaged: {words}") from error


def _check_canvas(file: IO[bytes], limits: MediaLimits) -> None:
    """Raises MediaError if a WebP's header is incomplete or breaks a limit. Sets the file back to position 0."""
    head = file.read(30)
    file.seek(0)
    try:
        if head[12:16] == b"VP8X":
            width, height = (1 + int.from_bytes(head[at : at + 3], "little") for at in (24, 27))
        elif head[12:16] == b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        else:
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
    except struct.error as error:
        raise MediaError("image", "truncated", "its header is not complete.") from error
    check_source_size("image", limits, height=height, width=width)

"""Decodes still images with Pillow: bounded by their header, complete, upright, in 8-bit RGB on white."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.image_rows import check_all_rows
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_sizes import check_source_size

if TYPE_CHECKING:
    from PIL import Image

_UPRIGHT = 1
_ORIENTATION = 0x0112  # the EXIF tag
_MAY_MOVE = ("GIF", "PNG", "WEBP")


@contextmanager
def opened_image(file: IO[bytes], form: str, limits: MediaLimits) -> Iterator[Image.Image]:
    """Opens an image of which only the header is read; raises MediaError if its header breaks a limit."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # our own limit holds instead; Pillow's refuses twice as much and else only warns
    if form == "WEBP":
        _check_canvas(file, limits)  # because Pillow allocates a WebP's canvas when it opens the file
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
    """Returns height and width of an opened image after the rotation that its EXIF data asks for."""
    with _refused_if_damaged():
        turned = image.getexif().get(_ORIENTATION, _UPRIGHT) in (5, 6, 7, 8)
    return (image.width, image.height) if turned else (image.height, image.width)


def decoded_image(image: Image.Image, file: IO[bytes]) -> Image.Image:
    """Returns the pixels of an image opened from ``file``, upright, as 8-bit RGB; what is transparent is white.

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
    """Returns a 16-bit grey image as RGB: the upper byte of each value, as Pillow does for 16-bit colours."""
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
    except Exception as error:  # foreign code over hostile bytes: its decoders raise any error
        if "MAX_TEXT" in str(error):
            raise MediaError("image", "too_many_bytes", f"a text in it unpacks to too much: {error}") from error
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MediaError("image", "truncated", f"it is truncated or damaged: {words}") from error


def _check_canvas(file: IO[bytes], limits: MediaLimits) -> None:
    """Raises MediaError if a WebP's header is incomplete or breaks a limit; the file stays at its begin."""
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

"""Tests the pixels of each kind of image. Expected values are constants or follow from the format's definition."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from relax_core.data.media.image_decoding import decoded_image, opened_image, upright_size
from relax_core.data.media.source_files import sniffed_format
from tests.data.media.conftest import LIMITS, refused
from tests.data.media.make_files import chunk, noise, png, saved

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def pixels(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    with opened_image(file, sniffed_format(data), LIMITS) as image:
        size = upright_size(image)
        decoded = decoded_image(image, file)
    assert decoded.mode == "RGB" and (decoded.height, decoded.width) == size
    return np.asarray(decoded)


def rows(*lines: bytes) -> bytes:
    """Returns the filtered lines of a PNG. Each line has the filter "none"."""
    return b"".join(b"\0" + line for line in lines)


TRANSPARENT_GREEN = chunk(b"tRNS", struct.pack(">HHH", *GREEN))
PALETTE = chunk(b"PLTE", bytes(RED + GREEN + BLUE)) + chunk(b"tRNS", bytes((255, 0)))
GREY_1234 = chunk(b"tRNS", struct.pack(">H", 0x1234))
PNGS: dict[str, tuple[bytes, list[tuple[int, ...]]]] = {
    "colours": (png(2, 1, rows(bytes(RED + BLUE))), [RED, BLUE]),
    "grey with alpha": (png(3, 1, rows(bytes((0, 255, 0, 0, 100, 255))), colour=4), [BLACK, WHITE, (100,) * 3]),
    "a palette with transparency": (png(3, 1, rows(bytes((0, 1, 2))), colour=3, more=PALETTE), [RED, WHITE, BLUE]),
    "a transparent colour": (png(2, 1, rows(bytes(GREEN + RED)), more=TRANSPARENT_GREEN), [WHITE, RED]),
    "one bit": (png(3, 1, rows(b"\xa0"), bits=1, colour=0), [WHITE, BLACK, WHITE]),
    "sixteen bits of grey keep the upper byte": (
        png(4, 1, rows(struct.pack(">HHHH", 0, 0x7FFF, 0x80FF, 0xFFFF)), bits=16, colour=0),
        [BLACK, (0x7F,) * 3, (0x80,) * 3, WHITE],
    ),
    "sixteen bits of grey with a transparent one": (
        png(2, 1, rows(struct.pack(">HH", 0x1234, 0x1235)), bits=16, colour=0, more=GREY_1234),
        [WHITE, (0x12,) * 3],
    ),
    "sixteen bits of colour keep the upper byte": (
        png(1, 1, rows(struct.pack(">HHH", 0x12FF, 0x8000, 0xFFFF)), bits=16, colour=2),
        [(0x12, 0x80, 0xFF)],
    ),
}


@pytest.mark.parametrize("name", PNGS)
def test_a_png_of_each_kind(name: str) -> None:
    data, wanted = PNGS[name]
    assert pixels(data)[0].tolist() == [list(row) for row in wanted]


def test_alpha_lies_on_white() -> None:
    """Half-transparent red on white is (255, 127, 127), within one level."""
    data = png(3, 1, rows(bytes((*RED, 255, *RED, 0, *RED, 128))), colour=6)
    opaque, clear, half = pixels(data)[0].tolist()
    assert (opaque, clear) == ([255, 0, 0], [255, 255, 255])
    assert half[0] == 255 and abs(half[1] - 127) <= 1 and half[1] == half[2]


def test_cmyk() -> None:
    """Pure cyan has no red, and paper is white. JPEG values differ by a few levels."""
    inks = np.zeros((16, 32, 4), np.uint8)
    inks[:, 16:, 0] = 255
    found = pixels(saved(Image.fromarray(inks, "CMYK"), "JPEG", quality=100))
    assert np.abs(found[8, 8].astype(int) - 255).max() <= 2
    assert np.abs(found[8, 24].astype(int) - (0, 255, 255)).max() <= 2


# By the definition of the EXIF tag: the position of each corner of the upright image (upper left, upper right, lower
# left, lower right) in the stored image. The stored corners have the numbers 0 1 / 2 3.
EXIF = {1: "0123", 2: "1032", 3: "3210", 4: "2301", 5: "0213", 6: "2031", 7: "3120", 8: "1302"}


@pytest.mark.parametrize("orientation", EXIF)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation_is_applied(orientation: int, form: str) -> None:
    corners = np.array([RED, GREEN, BLUE, WHITE], np.uint8)
    stored = corners.reshape(2, 2, 3).repeat(32, axis=0).repeat(16, axis=1)  # 64 high, 32 wide
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {"lossless": True} if form == "WEBP" else {}
    if form == "JPEG":
        options = {"quality": 100, "subsampling": 0}
    found = pixels(saved(stored, form, exif=exif.tobytes(), **options)).astype(int)
    height, width = found.shape[:2]
    assert (height, width) == ((64, 32) if orientation <= 4 else (32, 64))
    points = [found[y, x] for y in (8, height - 8) for x in (8, width - 8)]
    expected = [corners[int(number)] for number in EXIF[orientation]]
    assert np.abs(np.array(points) - np.array(expected, int)).max() <= 3


@pytest.mark.parametrize("form", ["BMP", "GIF", "WEBP"])
def test_other_formats_without_loss(form: str) -> None:
    stored = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    options: dict[str, object] = {"lossless": True} if form == "WEBP" else {}
    assert np.array_equal(pixels(saved(stored, form, **options)), stored)


@pytest.mark.parametrize("shade", [0, 127, 128])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_that_looks_as_if_rows_were_missing_is_read(form: str, shade: int) -> None:
    """The last rows of the image have the colour that Pillow uses for missing rows."""
    stored = noise(64, 40)
    stored[48:] = shade
    modes = ("RGB", "L", "P", "1", "I;16") if form == "PNG" else ("RGB", "L", "CMYK")
    for mode in modes:
        image = Image.fromarray(stored).convert("I" if mode == "I;16" else mode).convert(mode)
        assert pixels(saved(image, form)).shape == (64, 40, 3)


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 9])
def test_a_black_interlaced_image_is_read(height: int, width: int) -> None:
    """The sizes of the seven passes follow the format's definition. An image without the last line is refused."""
    passes = ((8, 8, 0, 0), (8, 8, 0, 4), (8, 4, 4, 0), (4, 4, 0, 2), (4, 2, 2, 0), (2, 2, 0, 1), (2, 1, 1, 0))
    filled = last = 0
    for row_step, column_step, row, column in passes:
        lines, columns = len(range(row, height, row_step)), len(range(column, width, column_step))
        if lines and columns:
            last = 1 + 3 * columns
            filled += lines * last
    assert not pixels(_interlaced(width, height, bytes(filled))).any()
    with refused("truncated"):
        pixels(_interlaced(width, height, bytes(filled - last)))


def _interlaced(width: int, height: int, lines: bytes) -> bytes:
    data = png(width, height, lines)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return data[:8] + chunk(b"IHDR", header) + data[33:]


def test_a_picture_with_a_preview_is_the_picture() -> None:
    """Phones store a second, smaller picture after the first (MPO)."""
    picture, preview = Image.fromarray(noise(64, 64)), Image.fromarray(noise(16, 16))
    data = saved(picture, "MPO", save_all=True, append_images=[preview], quality=95)
    assert pixels(data).shape == (64, 64, 3)

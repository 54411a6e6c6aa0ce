"""Makes images and videos for tests. Writes bytes directly if no library can write such a file."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image


def chunk(name: bytes, data: bytes) -> bytes:
    """Returns a chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int, height: int, rows: bytes, *, bits: int = 8, colour: int = 2, more: bytes = b"", level: int = 9
) -> bytes:
    """Returns a PNG with these filtered rows. ``more`` are chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = (chunk(b"IHDR", header), more, chunk(b"IDAT", zlib.compress(rows, level)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_bomb(width: int, height: int) -> bytes:
    """Returns a black PNG with one bit per pixel: some kilobytes contain many megapixels."""
    return png(width, height, bytes(1 + (width + 7) // 8) * height, bits=1, colour=0)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(pixels: np.ndarray | Image.Image, form: str, **options: object) -> bytes:
    """Encodes an image in a file format."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def animated(form: str, frames: int = 3) -> bytes:
    images = [Image.fromarray(noise(32, 32, seed)) for seed in range(frames)]
    return saved(images[0], form, save_all=True, append_images=images[1:], duration=100)


def video(
    frames: Sequence[np.ndarray],
    *,
    rate: int = 8,
    form: str = "mp4",
    codec: str = "h264",
    group: int = 12,
    header_first: bool = False,
) -> bytes:
    """Returns a video of uint8 frames ``[height, width, 3]`` with even sides, with ``group`` frames per key frame."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  # FFmpeg reads the file again to move its header
    options = {"movflags": "faststart"} if header_first else {}
    with file, av.open(file.name, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = group
        stream.codec_context.bit_rate = 4_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        container.close()
        return Path(file.name).read_bytes()


def sound_only() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        for _ in range(4):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def grey_frames(levels: Sequence[int], height: int = 64, width: int = 96) -> list[np.ndarray]:
    return [np.full((height, width, 3), level, np.uint8) for level in levels]


def patched(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """Returns an MP4 with replaced bytes, ``offset`` bytes after the name of the last box ``name``."""
    at = data.rindex(name) + len(name) + offset
    return data[:at] + value + data[at + len(value) :]

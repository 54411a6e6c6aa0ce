# ruff: noqa: E501 (a case is one line)
"""Tests generated hostile and broken files: each is refused with its reason, within a worker's memory and time."""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.media.encode_pool import EncodePool, EncodeSettings
from tests.data.media.conftest import Encode, check_hostile, check_memory, refused
from tests.data.media.make_files import (
    animated,
    chunk,
    grey_frames,
    noise,
    patched,
    png,
    png_bomb,
    saved,
    sound_only,
    video,
)

Content = Callable[[], bytes]


@cache
def plain_png() -> bytes:
    return saved(noise(64, 64), "PNG")


@cache
def plain_jpeg() -> bytes:
    return saved(noise(64, 64), "JPEG", quality=90)


@cache
def plain_video() -> bytes:
    return video([noise(64, 96, seed) for seed in range(24)])


@cache
def streamed_video() -> bytes:
    """Returns a video with its header at the beginning."""
    return video([noise(64, 96, seed) for seed in range(24)], header_first=True)


def tenths(content: Content) -> Iterator[tuple[int, Content]]:
    for tenth in range(1, 10):
        yield tenth, lambda tenth=tenth: content()[: len(content()) * tenth // 10]


def _webp(name: bytes, body: bytes) -> bytes:
    inner = b"WEBP" + name + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


def _bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def _jpeg_of(height: int, width: int, data: bytes | None = None) -> bytes:
    """Returns a JPEG with different sizes in header and data."""
    data = plain_jpeg() if data is None else data
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def _bad_crc() -> bytes:
    data = bytearray(plain_png())
    data[45] ^= 255
    return bytes(data)


def _text_bomb(name: bytes) -> bytes:
    packed = zlib.compress(bytes(30_000_000), 9)
    head = {b"zTXt": b"key\0\0", b"iTXt": b"key\0\1\0\0\0", b"iCCP": b"name\0\0"}[name]
    return png(1, 1, b"\0\0\0\0", more=chunk(name, head + packed))


PLAYLISTS = {
    "ffconcat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "dash": b"<?xml version='1.0'?><MPD><Period><BaseURL>file:///etc/passwd</BaseURL></Period></MPD>",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "subtitles": b"WEBVTT\n\n00:00.000 --> 00:01.000\nhello\n",
}
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/tmp/relax_eps_ran) (w) file closefile\nshowpage\n%%EOF\n"
BOX = struct.Struct(">I4s")

CASES: dict[str, tuple[MediaKind, str, Content]] = {
    "12 KB of 100 megapixels.png": ("image", "too_many_pixels", lambda: png_bomb(10_048, 10_048)),
    "50 KB of 400 megapixels.png": ("image", "too_many_pixels", lambda: png_bomb(20_032, 20_032)),
    "2 gigapixels each side.png": ("image", "too_many_pixels", lambda: png((1 << 31) - 1, (1 << 31) - 1, b"\0")),
    "bomb.bmp": ("image", "too_many_pixels", lambda: _bmp(30_000, 30_000)),
    "bomb.gif": ("image", "too_many_pixels", lambda: b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6) + b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\2\1\0\0;"),
    "bomb, extended.webp": ("image", "too_many_pixels", lambda: _webp(b"VP8X", bytes(4) + b"\xff\x3f\0" * 2)),
    "bomb, lossless.webp": ("image", "too_many_pixels", lambda: _webp(b"VP8L", b"\x2f" + b"\xff\xff\xff\x0f" + bytes(8))),
    "bomb, lossy.webp": ("image", "too_many_pixels", lambda: _webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + b"\xff\x3f\xff\x3f" + bytes(8))),
    "65,000 a side.jpg": ("image", "too_many_pixels", lambda: _jpeg_of(65_000, 65_000)),
    "8 rows more than data.jpg": ("image", "truncated", lambda: _jpeg_of(72, 64)),
    "twice the rows.jpg": ("image", "truncated", lambda: _jpeg_of(128, 64)),
    "twice the rows, restarts.jpg": ("image", "truncated", lambda: _jpeg_of(128, 64, saved(noise(64, 64), "JPEG", restart_marker_blocks=4))),
    "twice the rows, progressive.jpg": ("image", "truncated", lambda: _jpeg_of(128, 64, saved(noise(64, 64), "JPEG", progressive=True))),
    "twice the rows, grey.jpg": ("image", "truncated", lambda: _jpeg_of(128, 64, saved(Image.fromarray(noise(64, 64)).convert("L"), "JPEG"))),
    "twice the rows, four inks.jpg": ("image", "truncated", lambda: _jpeg_of(128, 64, saved(Image.fromarray(noise(64, 64)).convert("CMYK"), "JPEG"))),
    "one row more than data.png": ("image", "truncated", lambda: png(8, 9, bytes([0, *[7] * 24]) * 8)),
    "twice the rows.png": ("image", "truncated", lambda: png(8, 16, bytes([0, *[7] * 24]) * 8)),
    "twice the rows, 16 bits.png": ("image", "truncated", lambda: png(8, 16, bytes([0, *[7] * 16]) * 8, bits=16, colour=0)),
    "twice the rows, alpha.png": ("image", "truncated", lambda: png(8, 16, bytes([0, *[7] * 32]) * 8, colour=6)),
    "twice the rows, palette.png": ("image", "truncated", lambda: png(8, 16, bytes([0, *[1] * 8]) * 8, colour=3, more=chunk(b"PLTE", bytes(6)))),
    "1 x 100,000.png": ("image", "bad_aspect", lambda: png(1, 100_000, bytes(4 * 100_000))),
    "100,000 x 1.png": ("image", "bad_aspect", lambda: png(100_000, 1, bytes(300_001))),
    "201 to 1.png": ("image", "bad_aspect", lambda: saved(noise(8, 8 * 201), "PNG")),
    "no width.png": ("image", "truncated", lambda: png(0, 8, b"\0")),
    "moves.gif": ("image", "animated", lambda: animated("GIF")),
    "moves.png": ("image", "animated", lambda: animated("PNG")),
    "moves.webp": ("image", "animated", lambda: animated("WEBP")),
    "empty.png": ("image", "truncated", lambda: b""),
    "only magic.png": ("image", "truncated", lambda: b"\x89PNG\r\n\x1a\n"),
    "only magic.jpg": ("image", "truncated", lambda: b"\xff\xd8\xff"),
    "only magic.webp": ("image", "truncated", lambda: b"RIFF\x04\0\0\0WEBP"),
    "only magic.bmp": ("image", "truncated", lambda: b"BM"),
    "only magic.gif": ("image", "truncated", lambda: b"GIF89a"),
    "bad sum.png": ("image", "truncated", _bad_crc),
    "no pixels.png": ("image", "truncated", lambda: png(64, 64, b"")),
    "an unknown colour type.png": ("image", "truncated", lambda: png(8, 8, bytes(25 * 8), colour=5)),
    "more rows than data.bmp": ("image", "truncated", lambda: _bmp(64, 64)),
    "half.webp": ("image", "truncated", lambda: saved(noise(64, 64), "WEBP")[:2000]),
    "half.gif": ("image", "truncated", lambda: saved(noise(64, 64), "GIF")[:2000]),
    "half.bmp": ("image", "truncated", lambda: saved(noise(64, 64), "BMP")[:6000]),
    "text bomb.png": ("image", "too_many_bytes", lambda: _text_bomb(b"zTXt")),
    "long text bomb.png": ("image", "too_many_bytes", lambda: _text_bomb(b"iTXt")),
    "profile bomb.png": ("image", "too_many_bytes", lambda: _text_bomb(b"iCCP")),
    "PostScript.png": ("image", "unknown_format", lambda: EPS),
    "SVG.png": ("image", "unknown_format", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'),
    "TIFF.png": ("image", "unknown_format", lambda: saved(noise(8, 8), "TIFF")),
    "PDF.png": ("image", "unknown_format", lambda: b"%PDF-1.4\n"),
    "ICO.png": ("image", "unknown_format", lambda: saved(noise(16, 16), "ICO")),
    "JPEG 2000.jpg": ("image", "unknown_format", lambda: saved(noise(64, 64), "JPEG2000")),
    "AVIF.png": ("image", "unknown_format", lambda: saved(noise(64, 64), "AVIF")),
    "text.png": ("image", "unknown_format", lambda: b"hello"),
    "noise.png": ("image", "unknown_format", lambda: np.random.default_rng(7).bytes(500)),
    "pickle.png": ("image", "unknown_format", lambda: b"\x80\x04cos\nsystem\n"),
    "a video.png": ("image", "unknown_format", plain_video),
    "a playlist.png": ("image", "unknown_format", lambda: PLAYLISTS["hls"]),
    "a picture.mp4": ("video", "unknown_format", plain_png),
    "an animation.mp4": ("video", "unknown_format", lambda: animated("GIF")),
    "AVI.mp4": ("video", "unknown_format", lambda: video(grey_frames(range(8)), form="avi", codec="mpeg4")),
    "an odd codec.mp4": ("video", "unknown_format", lambda: video(grey_frames(range(8)), form="matroska", codec="ffv1")),
    "PostScript.mp4": ("video", "unknown_format", lambda: EPS),
    **{f"{name}.mp4": ("video", "unknown_format", lambda name=name: PLAYLISTS[name]) for name in PLAYLISTS},
    **{
        f"{name} behind a box.mp4": ("video", "truncated", lambda name=name: BOX.pack(16, b"ftyp") + b"isom\0\0\0\0" + PLAYLISTS[name])
        for name in PLAYLISTS
    },
    "empty.mp4": ("video", "truncated", lambda: b""),
    "noise.mp4": ("video", "truncated", lambda: BOX.pack(16, b"ftyp") + np.random.default_rng(7).bytes(3000)),
    "noise.mkv": ("video", "truncated", lambda: b"\x1a\x45\xdf\xa3" + np.random.default_rng(7).bytes(3000)),
    "a box of 4 GB.mp4": ("video", "no_frames", lambda: BOX.pack(16, b"ftyp") + b"isom\0\0\0\0" + BOX.pack(0xFFFFFFFF, b"moov")),
    "header alone.mp4": ("video", "truncated", lambda: streamed_video()[: streamed_video().index(b"mdat") - 4]),
    "sound.mp4": ("video", "no_frames", sound_only),
    "no frames.mkv": ("video", "no_frames", lambda: video(grey_frames(range(2)), form="matroska")[:600]),
    "damaged in the middle.mp4": ("video", "truncated", lambda: plain_video()[:3000] + bytes(20_000) + plain_video()[23_000:]),
    "8 megapixels.mp4": ("video", "too_many_pixels", lambda: video(grey_frames([1], 2_000, 4_000))),
    "8 megapixels behind a small header.mp4": ("video", "too_many_pixels", lambda: patched(video(grey_frames([1], 2_000, 4_000)), b"avc1", 24, b"\0\x40\0\x40")),
    "1 x 400.mp4": ("video", "bad_aspect", lambda: video(grey_frames(range(4), 2, 402))),
    "weeks.mp4": ("video", "too_long", lambda: patched(plain_video(), b"mdhd", 12, struct.pack(">II", 1, 10_000_000))),
    "2 minutes.mp4": ("video", "too_long", lambda: video(grey_frames([9] * 121), rate=1)),
    "1,001 frames.mp4": ("video", "too_many_frames", lambda: video(grey_frames([9] * 1_001, 16, 16), rate=50)),
    "1,001 frames.mkv": ("video", "too_many_frames", lambda: video(grey_frames([9] * 1_001, 16, 16), rate=50, form="matroska")),
    "a billion frames.mp4": ("video", "truncated", lambda: patched(plain_video(), b"stsz", 8, struct.pack(">I", 1_000_000_000))),
    "9 MB.png": ("image", "too_many_bytes", lambda: bytes(9 << 20)),
    "9 MB.mp4": ("video", "too_many_bytes", lambda: bytes(9 << 20)),
}  # fmt: skip
for _name, _kind, _content in (
    ("png", "image", plain_png),
    ("jpg", "image", plain_jpeg),
    ("mp4", "video", plain_video),
    ("streamed.mp4", "video", streamed_video),
):
    for _tenth, _part in tenths(_content):
        CASES[f"{_tenth} tenths.{_name}"] = (_kind, "truncated", _part)  # type: ignore[assignment]


@pytest.fixture(scope="module", autouse=True)
def memory_limit_holds(pool: EncodePool) -> Iterator[None]:
    """Checks after all files that no worker was replaced, and that workers stayed within their address space limit."""
    started = [worker.pid for worker in pool.workers]
    yield
    check_memory(pool, started)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_gives_its_reason(encode: Encode, root: Path, name: str) -> None:
    check_hostile(encode, root, name, CASES[name])


def test_no_interpreter_ran_and_no_item_was_written(settings: EncodeSettings, encode: Encode) -> None:
    with refused("unknown_format"):
        encode(MediaSource(kind="image", data=EPS))
    assert not Path("/tmp/relax_eps_ran").exists()
    assert not list(Path(settings.folder).glob("*.part"))


@pytest.mark.parametrize(
    "path",
    [
        "http://127.0.0.1:9/a.png", "https://example.org/a.png", "HTTP://example.org/a.png", "ftp://example.org/a.png",
        "file:///etc/passwd", "file:a.png", "s3://bucket/a.png", "rtsp://127.0.0.1/a", "concat:a.mp4|b.mp4",
        "subfile:,,start,0,end,9,:/etc/passwd", "pipe:0", "data:image/png;base64,AAAA",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["image", "video"])
def test_an_address_is_refused(encode: Encode, path: str, kind: MediaKind) -> None:
    with refused("remote_refused"):
        encode(MediaSource(kind=kind, path=path))


def _make_paths(root: Path) -> dict[str, str]:
    """Returns paths that are not media files below the root, each with its reason."""
    outside = root.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "a.png").write_bytes(plain_png())
    (root / "folder").mkdir()
    (root / "link out.png").symlink_to(outside / "a.png")
    (root / "folder out").symlink_to(outside)
    (root / "chain.png").symlink_to(root / "link out.png")
    (root / "nowhere.png").symlink_to(root / "not there.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe.png")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(root / "socket.png"))
    server.close()
    with (root / "sparse.png").open("wb") as file:
        file.truncate(1 << 40)
    return {
        "not there.png": "missing_file",
        "not there/a.png": "missing_file",
        "nowhere.png": "missing_file",
        "loop.png": "missing_file",
        "a\0b.png": "missing_file",
        "x" * 300 + ".png": "missing_file",
        "": "unknown_format",
        ".": "unknown_format",
        "folder": "unknown_format",
        "pipe.png": "unknown_format",
        "socket.png": "unknown_format",
        "../outside/a.png": "outside_root",
        "folder/../../outside/a.png": "outside_root",
        str(outside / "a.png"): "outside_root",
        str(root) + "er/../outside/a.png": "missing_file",
        "link out.png": "outside_root",
        "chain.png": "outside_root",
        "folder out/a.png": "outside_root",
        "zero.png": "outside_root",
        "/dev/zero": "outside_root",
        "/proc/self/environ": "outside_root",
        "sparse.png": "too_many_bytes",
    }


def test_what_is_no_file_below_the_root_is_refused(encode: Encode, root: Path) -> None:
    wrong = {}
    for path, word in _make_paths(root).items():
        for kind in ("image", "video"):
            with pytest.raises(MediaError) as error:
                encode(MediaSource(kind=kind, path=path))
            if error.value.word != word:
                wrong[path] = str(error.value)
    assert not wrong


def test_a_link_within_the_root_and_an_absolute_path_are_read(encode: Encode, root: Path) -> None:
    (root / "real.png").write_bytes(plain_png())
    (root / "inside.png").symlink_to(root / "real.png")
    digests = {
        encode(MediaSource(kind="image", path=path)).digest
        for path in ("real.png", "inside.png", str(root / "real.png"), "./real.png")
    }
    assert digests == {encode(MediaSource(kind="image", data=plain_png())).digest}


def test_a_huge_still_image_of_few_bytes_within_the_limit_is_read(encode: Encode) -> None:
    item = encode(MediaSource(kind="image", data=saved(Image.new("L", (2_000, 1_999)), "PNG")))
    assert (item.width, item.height) == (2_000, 1_999)

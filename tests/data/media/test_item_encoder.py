"""Tests items of real images and videos: frames, rows, time stamps, digests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.contracts.media_file import FolderReader
from relax_core.data.media.encode_pool import EncodeSettings
from relax_core.data.media.media_trial_main import TRIAL_SETTINGS
from relax_core.data.tokenizer import PromptTokenizer
from tests.data.media.conftest import Encode
from tests.data.media.make_files import grey_frames, noise, patched, saved, video

IMAGE, VIDEO, START, END = (
    TRIAL_SETTINGS.image_token_id,
    TRIAL_SETTINGS.video_token_id,
    TRIAL_SETTINGS.vision_start_token_id,
    TRIAL_SETTINGS.vision_end_token_id,
)


@pytest.fixture(scope="module")
def frames_of(settings: EncodeSettings) -> object:
    reader = FolderReader(Path(settings.folder))
    return lambda item: reader.tensors(item)["frames"]


def test_an_image_that_needs_no_resize_keeps_its_pixels(encode: Encode, frames_of) -> None:  # type: ignore[no-untyped-def]
    pixels = noise(64, 96)
    item = encode(MediaSource(kind="image", data=saved(pixels, "PNG")))
    assert np.array_equal(frames_of(item), pixels[None])
    assert (item.grid, item.rows, item.patches, item.description) == ([1, 4, 6], 6, 24, "[image 96×64]")
    assert set(item.ids) == {IMAGE} and item.placeholder == [IMAGE] and item.advance == 3
    assert item.rotary_offsets.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


def test_an_image_is_resized_as_pillow_does(encode: Encode, frames_of) -> None:  # type: ignore[no-untyped-def]
    pixels = noise(201, 333)
    item = encode(MediaSource(kind="image", data=saved(pixels, "PNG")))
    expected = Image.fromarray(pixels).resize((320, 192), Image.Resampling.BICUBIC)
    assert np.array_equal(frames_of(item)[0], np.asarray(expected))
    assert (item.width, item.height) == (333, 201)


def test_equal_content_has_one_digest_and_other_content_another(encode: Encode, root: Path) -> None:
    pixels = noise(64, 64, seed=3)
    (root / "one.png").write_bytes(saved(pixels, "PNG"))
    (root / "other name.bmp").write_bytes(saved(pixels, "BMP"))
    same = [
        encode(MediaSource(kind="image", path="one.png")),
        encode(MediaSource(kind="image", path="other name.bmp")),
        encode(MediaSource(kind="image", data=saved(pixels, "WEBP", lossless=True))),
    ]
    assert same[0] == same[1] == same[2]
    pixels[5, 5, 1] ^= 1
    assert encode(MediaSource(kind="image", data=saved(pixels, "PNG"))).digest != same[0].digest


def _levels(frames: np.ndarray) -> list[int]:
    return frames.reshape(len(frames), -1).mean(axis=1).round().astype(int).tolist()


@pytest.mark.parametrize("container", ["mp4 h264", "mp4 mpeg4", "matroska h264", "webm libvpx"])
@pytest.mark.parametrize("group", [1, 5, 250])
def test_the_sampled_frames_are_the_right_ones(encode: Encode, frames_of, container: str, group: int) -> None:  # type: ignore[no-untyped-def]
    """Frame k of 40 has grey level 6 k. 5 seconds at 2 frames per second give 10 frames, spread evenly from 0 to 39."""
    form, codec = container.split()
    data = video(grey_frames([6 * number for number in range(40)]), form=form, codec=codec, group=group)
    item = encode(MediaSource(kind="video", data=data))
    wanted = [0, 4, 9, 13, 17, 22, 26, 30, 35, 39]  # the frames nearest to 39/9 k
    assert np.abs(np.array(_levels(frames_of(item))) - 6 * np.array(wanted)).max() <= 2
    assert item.frames == 10 and item.grid == [5, 4, 6] and item.description == "[video 96×64, 10 frames]"


def test_a_video_has_its_time_stamps_and_frames_as_rows(encode: Encode, settings: EncodeSettings) -> None:
    """4 frames are sampled at 0, 1, 2 and 3 s. Two frames form a patch, so the time stamps are 0.5 s and 2.5 s."""
    item = encode(MediaSource(kind="video", data=video(grey_frames([0, 80, 160, 240], 32, 64), rate=1)))
    stamps = [PromptTokenizer(Path(settings.model_folder)).encode_plain(f"<{at} seconds>") for at in ("0.5", "2.5")]
    expected = [*stamps[0], START, VIDEO, VIDEO, END, *stamps[1], START, VIDEO, VIDEO, END]
    assert item.ids.tolist() == expected
    assert item.placeholder == [VIDEO] and item.seconds == 2.0
    first = len(stamps[0]) + 1  # in the first frame's first row the column advances; time and row stay
    assert item.rotary_offsets[:, first : first + 3].tolist() == [[first, first, first + 2]] * 2 + [
        [first, first + 1, first + 2]
    ]


def test_an_odd_number_of_frames_and_a_single_one(encode: Encode, frames_of) -> None:  # type: ignore[no-untyped-def]
    five = encode(MediaSource(kind="video", data=video(grey_frames([0, 50, 100, 150, 200]), rate=2)))
    assert (five.frames, five.grid[0], len(frames_of(five))) == (5, 3, 5)
    item = encode(MediaSource(kind="video", data=video(grey_frames([90]))))
    assert (item.frames, item.grid[0]) == (2, 1) and _levels(frames_of(item)) == pytest.approx([90, 90], abs=2)


# Numpy rotation of the frame → the matrix of a track header: a, b, c, d of x' = a x + c y, y' = b x + d y. y points
# down.
TURNS = {0: (1, 0, 0, 1), -1: (0, 1, -1, 0), 2: (-1, 0, 0, -1), 1: (0, -1, 1, 0)}


@pytest.mark.parametrize("turns", TURNS)
def test_the_rotation_of_a_phone_is_applied(encode: Encode, frames_of, turns: int) -> None:  # type: ignore[no-untyped-def]
    corners = np.array([[0, 80], [160, 240]], np.uint8).repeat(32, axis=0).repeat(64, axis=1)
    frame = np.stack([corners] * 3, axis=-1)
    a, b, c, d = (number << 16 for number in TURNS[turns])
    matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    data = patched(video([frame] * 4), b"tkhd", 40, matrix)
    item = encode(MediaSource(kind="video", data=data))
    found = frames_of(item)[0].astype(int)
    expected = np.rot90(frame, turns)
    assert found.shape == expected.shape and (item.height, item.width) == expected.shape[:2]
    assert np.abs(found[::16, ::16] - expected[::16, ::16]).max() <= 8


def test_another_time_stamp_is_another_item(encode: Encode) -> None:
    slow, fast = (MediaSource(kind="video", data=video(grey_frames([7] * 4), rate=rate)) for rate in (1, 2))
    items: list[MediaItem] = [encode(slow), encode(fast)]
    assert items[0].digest != items[1].digest and items[0].ids.tolist() != items[1].ids.tolist()

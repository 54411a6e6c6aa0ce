"""Tests that the rows, patches and bytes of encoded items can be computed from file headers only."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from relax_core.contracts.media import MediaSource
from relax_core.data.media.encode_pool import EncodeSettings
from relax_core.data.media.media_headers import STAMP_TOKENS, MediaHeader, planned_item, read_media_header
from relax_core.data.media.media_trial_main import TRIAL_SETTINGS
from relax_core.data.tokenizer import PromptTokenizer
from tests.data.media.conftest import LIMITS, Encode, refused
from tests.data.media.make_files import grey_frames, noise, png_bomb, saved, video


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(noise(100, 200), "JPEG", exif=exif.tobytes())


@pytest.mark.parametrize("data", [saved(noise(201, 333), "PNG"), _rotated(), saved(noise(40, 900), "WEBP")])
def test_an_image(encode: Encode, root: Path, data: bytes) -> None:
    source = MediaSource(kind="image", data=data)
    header = read_media_header(source, LIMITS, root=root)
    planned, item = planned_item(header, TRIAL_SETTINGS, LIMITS), encode(source)
    assert (header.width, header.height) == (item.width, item.height)
    assert (planned.rows, planned.patches, planned.nbytes) == (item.rows, item.patches, item.nbytes)


@pytest.mark.parametrize("form", ["mp4", "matroska"])  # Matroska does not store the number of frames
@pytest.mark.parametrize("frames", [1, 2, 5, 40])
def test_a_video(encode: Encode, root: Path, settings: EncodeSettings, form: str, frames: int) -> None:
    source = MediaSource(kind="video", data=video(grey_frames(range(frames)), form=form))
    header = read_media_header(source, LIMITS, root=root)
    assert header == MediaHeader(kind="video", width=96, height=64, frames=frames, seconds=frames / 8)
    planned, item = planned_item(header, TRIAL_SETTINGS, LIMITS), encode(source)
    assert (planned.patches, planned.nbytes) == (item.patches, item.nbytes)
    steps = item.grid[0]
    assert planned.rows - steps * STAMP_TOKENS == (item.ids == TRIAL_SETTINGS.video_token_id).sum() + 2 * steps
    tokenize = PromptTokenizer(Path(settings.model_folder)).encode_plain
    assert planned_item(header, TRIAL_SETTINGS, LIMITS, tokenize=tokenize).rows == item.rows


def test_a_bomb(root: Path) -> None:
    with refused("too_many_pixels"):
        read_media_header(MediaSource(kind="image", data=png_bomb(20_000, 20_000)), LIMITS, root=root)

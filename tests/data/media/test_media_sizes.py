"""Tests that sizes and time stamps equal transformers' Qwen-VL processors, within our limits."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.media import MediaError
from relax_core.data.media.media_limits import MediaLimits, image_size, video_size
from relax_core.data.media.media_trial_main import TRIAL_SETTINGS
from relax_core.data.media.video_decoding import sample_frames, stamp_seconds
from tests.data.media.conftest import refused

SIDES = st.integers(1, 3_000)
WIDE = MediaLimits(image_rows_min=1, image_rows_max=100_000, frame_rows=100_000, source_pixels=10**9)


@given(SIDES, SIDES, st.sampled_from([4_096, 65_536]), st.sampled_from([262_144, 16_777_216]))
def test_images_have_the_sizes_of_the_published_function(height: int, width: int, least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    tower = dataclasses.replace(TRIAL_SETTINGS, min_pixels=least, max_pixels=most)
    try:
        published = smart_resize(height, width, factor=32, min_pixels=least, max_pixels=most)
    except ValueError:
        with refused("bad_aspect"):
            image_size(tower, WIDE, height=height, width=width)
    else:
        assert image_size(tower, WIDE, height=height, width=width) == published


@given(
    SIDES, SIDES, st.integers(2, 64), st.sampled_from([128 * 32 * 32, 4_096]), st.sampled_from([786_432, 25_165_824])
)
def test_frames_have_the_sizes_of_the_published_function(
    height: int, width: int, frames: int, least: int, most: int
) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    tower = dataclasses.replace(TRIAL_SETTINGS, video_min_pixels=least, video_max_pixels=most)
    if max(height, width) > 200 * min(height, width):
        with refused("bad_aspect"):
            video_size(tower, WIDE, frames=frames, height=height, width=width)
        return
    published = smart_resize(frames, height, width, factor=32, temporal_factor=2, min_pixels=least, max_pixels=most)
    assert video_size(tower, WIDE, frames=frames, height=height, width=width) == published


@given(SIDES, SIDES, st.integers(2, 64))
def test_no_item_has_more_rows_than_the_limits(height: int, width: int, frames: int) -> None:
    limits = MediaLimits(image_rows_min=4, image_rows_max=64, frame_rows=16)
    for most, kind in ((64, "image"), (16, "video")):
        rows = _rows(kind, limits, frames=frames, height=height, width=width)
        assert rows is None or 1 <= rows <= most


def _rows(kind: str, limits: MediaLimits, *, frames: int, height: int, width: int) -> int | None:
    """Returns the rows of an image or a frame, or None for a refusal."""
    try:
        if kind == "image":
            size = image_size(TRIAL_SETTINGS, limits, height=height, width=width)
        else:
            size = video_size(TRIAL_SETTINGS, limits, frames=frames, height=height, width=width)
    except MediaError:
        return None
    return int(np.prod(size)) // 32**2


def test_a_strip_that_cannot_be_small_enough_has_too_many_tokens() -> None:
    limits = MediaLimits(image_rows_min=1, image_rows_max=4)
    with refused("too_many_tokens"):
        image_size(TRIAL_SETTINGS, limits, height=10, width=2_000)


@given(st.integers(1, 5_000), st.sampled_from([1.0, 8.0, 23.976, 25.0, 29.97, 60.0]))
def test_frames_and_stamps_are_those_of_the_published_processor(frames: int, fps: float) -> None:
    from types import SimpleNamespace

    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    settings = SimpleNamespace(fps=2, num_frames=None, min_frames=4, max_frames=64)
    metadata = SimpleNamespace(total_num_frames=frames, fps=fps)
    published = Qwen3VLVideoProcessor.sample_frames(settings, metadata)
    indices = sample_frames(frames, fps, MediaLimits())
    assert indices == published.tolist()
    stamps = Qwen3VLProcessor._calculate_timestamps(None, published, fps, 2)
    assert stamp_seconds(indices, fps, 2) == stamps

"""Compares the rows of audio and timed videos with the ids and positions of transformers' Qwen3-Omni."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
    _get_feat_extract_output_lengths,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.rotary import rotary_of_sequence
from relax_core.families.architecture import AudioSettings, PatchSettings
from relax_core.families.audio_tower import clip_rows, video_with_sound_rows
from relax_core.families.vision_tower import ItemRows, image_rows, timed_video_rows

IMAGE, VIDEO, AUDIO, VISION_START, VISION_END, AUDIO_START, AUDIO_END = range(90, 97)
NAMES = {
    IMAGE: "<image>", VIDEO: "<video>", AUDIO: "<audio>", VISION_START: "<vs>", VISION_END: "<ve>",
    AUDIO_START: "<as>", AUDIO_END: "<ae>",
}  # fmt: skip
SEEN = PatchSettings(
    patch_size=16, temporal_patch_size=2, merge_size=2, image_token_id=IMAGE, video_token_id=VIDEO,
    vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, positions_per_second=13,
)  # fmt: skip
HEARD = AudioSettings(
    sampling_rate=16000, mel_bins=128, fft_size=400, hop_length=160, chunk_frames=100, audio_token_id=AUDIO,
    audio_start_token_id=AUDIO_START, audio_end_token_id=AUDIO_END,
)  # fmt: skip
ROUNDING = 1e-4  # transformers adds positions in float32; near 512 its resolution is 6e-5

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5)).map(lambda size: (2 * size[0], 2 * size[1]))
frames = st.integers(10, 700)
images = st.tuples(st.just("image"), sizes)
clips = st.tuples(st.just("audio"), frames)
videos = st.tuples(st.just("video"), st.integers(1, 6), sizes, st.sampled_from((0.5, 1.0, 0.8, 1 / 3, 2.1)), frames)


@pytest.mark.parametrize("count", [10, 15, 99, 100, 101, 730, 3000])
def test_a_sound_has_the_rows_of_transformers(count: int) -> None:
    assert HEARD.rows_of_frames(count) == _get_feat_extract_output_lengths(count)


def test_a_clip_that_is_short_by_a_sample_is_counted_with_its_frames() -> None:
    assert HEARD.frames_of_seconds(0.1) == 10 and HEARD.frames_of_seconds(0.1001) == 11
    assert HEARD.rows_of_frames(HEARD.frames_of_seconds(30.0)) == 30 * 13


@given(st.lists(st.one_of(images, clips, videos), min_size=1, max_size=5), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_ids_and_positions_are_those_of_transformers(shown: list[Any], heard: bool, data: st.DataObject) -> None:
    media: list[Media] = []
    ids: list[int] = []
    template: list[int] = []
    for medium in shown:
        text = [1] * data.draw(st.integers(0, 3))
        before, after = (AUDIO_START, AUDIO_END) if medium[0] == "audio" else (VISION_START, VISION_END)
        rows = rows_of(medium, heard=heard)
        start = len(ids) + len(text) + 1
        ids += [*text, before, *rows.token_ids.tolist(), after]
        template += [*text, before, *rows.placeholder, after]
        media.append(Media(item_of(rows), start, start + len(rows.token_ids)))
    tail = data.draw(st.integers(1, 3))
    ids += [1] * tail
    template += [1] * tail
    grids = Grids(shown, heard=heard)
    assert ids == expanded(template, grids, heard=heard)
    ours, following = rotary_of_sequence(len(ids), media)
    theirs, delta = positions(ids, grids, heard=heard)
    np.testing.assert_allclose(ours, theirs, atol=ROUNDING)
    assert following == pytest.approx(float(ours[:, -1].max()) + 1)
    assert ours.max() + 1 - len(ids) == pytest.approx(delta, abs=ROUNDING)


def test_a_sound_before_its_video_ends_decides_nothing() -> None:
    """Only the rest of the longer item moves the positions, even if the other item reaches further."""
    rows = video_with_sound_rows(SEEN, HEARD, grid=[2, 2, 2], seconds=10.0, frames=10)
    assert rows.offsets[0].tolist() == [0, 1, 1, 2, 131, 132] and rows.advance == 133
    rows = video_with_sound_rows(SEEN, HEARD, grid=[1, 20, 20], seconds=1.0, frames=24)
    assert rows.advance == 5, "its height is 10 rows, and the following three audio rows end before position 4"


def test_whole_seconds_give_whole_offsets() -> None:
    rows = timed_video_rows(SEEN, grid=[3, 2, 4], seconds=1.0)
    assert rows.offsets.tolist() == [[0, 0, 13, 13, 26, 26], [0] * 6, [0, 1] * 3] and rows.advance == 27


def rows_of(medium: Any, *, heard: bool) -> ItemRows:
    if medium[0] == "image":
        return image_rows(SEEN, grid=[1, *medium[1]])
    if medium[0] == "audio":
        return clip_rows(HEARD, frames=medium[1])
    _, steps, size, seconds, count = medium
    grid = [steps, *size]
    if heard:
        return video_with_sound_rows(SEEN, HEARD, grid=grid, seconds=seconds, frames=count)
    return timed_video_rows(SEEN, grid=grid, seconds=seconds)


def item_of(rows: ItemRows) -> MediaItem:
    return MediaItem(
        kind="video", digest="", token_ids=rows.token_ids.astype("<i4").tobytes(),
        offsets=rows.offsets.astype("<f4").tobytes(), fractional=True, advance=rows.advance,
        placeholder=rows.placeholder, grid=[0, 0, 0], width=0, height=0,
    )  # fmt: skip


class Grids:
    """Holds transformers' inputs that describe the items."""

    def __init__(self, shown: list[Any], *, heard: bool) -> None:
        self.images = torch.tensor([[1, *medium[1]] for medium in shown if medium[0] == "image"]).reshape(-1, 3)
        self.videos = torch.tensor([[medium[1], *medium[2]] for medium in shown if medium[0] == "video"]).reshape(-1, 3)
        self.seconds = [medium[3] for medium in shown if medium[0] == "video"]
        self.frames = [medium[-1] for medium in shown if medium[0] == "audio" or (medium[0] == "video" and heard)]


def expanded(template: list[int], grids: Grids, *, heard: bool) -> list[int]:
    """Returns the ids that transformers' processor makes from a template's ids."""
    sizes = SimpleNamespace(merge_size=2)
    processor = SimpleNamespace(
        image_processor=sizes, video_processor=sizes, image_token=NAMES[IMAGE], video_token=NAMES[VIDEO],
        audio_token=NAMES[AUDIO], vision_bos_token=NAMES[VISION_START], vision_eos_token=NAMES[VISION_END],
        audio_bos_token=NAMES[AUDIO_START], audio_eos_token=NAMES[AUDIO_END],
    )  # fmt: skip
    (text,) = Qwen3OmniMoeProcessor.replace_multimodal_special_tokens(
        processor,
        ["".join(NAMES.get(token_id, "t") for token_id in template)],
        iter([_get_feat_extract_output_lengths(count) for count in grids.frames]),
        iter(grids.images.numpy()),
        iter(grids.videos.numpy()),
        video_second_per_grid=iter(grids.seconds),
        use_audio_in_video=heard,
        position_id_per_seconds=13.0,
        seconds_per_chunk=2.0,
    )
    ids = {name: number for number, name in NAMES.items()} | {"t": 1}
    return [ids[token] for token in re.findall(r"<[a-z]+>|t", text)]


def positions(ids: list[int], grids: Grids, *, heard: bool) -> tuple[np.ndarray, float]:
    """Returns the positions of transformers' model, ``[3, ids]``, and its delta."""
    config = SimpleNamespace(
        image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO, vision_start_token_id=VISION_START,
        audio_start_token_id=AUDIO_START, position_id_per_seconds=13, audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    base = Qwen3OmniMoePreTrainedModelForConditionalGeneration
    model = SimpleNamespace(config=config, spatial_merge_size=2)
    model.get_llm_pos_ids_for_vision = lambda *given: base.get_llm_pos_ids_for_vision(model, *given)
    found, delta = base.get_rope_index(
        model,
        torch.tensor([ids]),
        image_grid_thw=grids.images,
        video_grid_thw=grids.videos,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        use_audio_in_video=heard,
        audio_seqlens=torch.tensor(grids.frames),
        second_per_grids=torch.tensor(grids.seconds),
    )
    return found[:, 0].numpy(), float(delta)

"""Tests images and videos in a request that the engine refuses with status 400."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.parity_omni import OmniItems, make_omni_model
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import FolderReader, write_item
from relax_core.engines.asgi_server import HttpError
from relax_core.engines.embedded.generate_body import RequestMedia, parse_body
from relax_core.engines.embedded.model_config import ModelConfig, read_model_config
from tests.vision_models import Seen, make_tiny_vision_model, text


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("seen")
    make_tiny_vision_model(folder / "model")
    return Seen(folder / "model", folder / "media")


@pytest.fixture(scope="module")
def config(seen: Seen) -> ModelConfig:
    return read_model_config(seen.model_folder)


def entries(media: list[Media]) -> list[tuple[str, int]]:
    return [(medium.item.digest, medium.start) for medium in media]


def test_items_are_found_where_they_are(seen: Seen, config: ModelConfig) -> None:
    prompts = [
        seen.prompt(text(3), seen.image(2, 2), text(1), seen.video(2, 2, 2)),
        (text(4), []),
        seen.prompt(text(9)),
    ]
    found = RequestMedia(FolderReader(seen.folder), config).of_prompts(
        [entries(prompts[0][1]), None, []], [ids for ids, _ in prompts]
    )
    assert found == [media for _, media in prompts]


@pytest.mark.parametrize(
    "change",
    [
        {"grid": [1, 4, 8]},
        {"grid": [2, 4, 4]},
        {"grid": [1, 2, 8]},
        {"grid": [4, 4]},
        {"grid": []},
        {"advance": 40.0},
        {"advance": 0.0},
        {"advance": float("nan")},
        {"offsets": b""},
        {"offsets": np.full((3, 4), -1, dtype="<i4").tobytes()},
        {"offsets": np.full((3, 4), np.nan, dtype="<f4").tobytes(), "fractional": True},
    ],
    ids=[
        "wide",
        "long",
        "narrow",
        "flat",
        "empty",
        "far",
        "still",
        "nan advance",
        "no offsets",
        "negative offsets",
        "nan offsets",
    ],
)
def test_items_of_another_model_are_refused(seen: Seen, config: ModelConfig, change: dict[str, Any]) -> None:
    """The file is complete, but the tower cannot process it: rows, grid and frames do not match."""
    frames = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    right = seen.image(2, 2, seed=77)
    wrong = msgspec.structs.replace(right, digest="f" * 32, **change)
    assert_refused(seen, config, write_item(seen.folder, wrong, {"frames": frames}))
    for tensors in ({"frames": frames[:, :16]}, {"frames": frames.astype(np.float32)}, {}):
        other_item = msgspec.structs.replace(right, digest="e" * 32)
        assert_refused(seen, config, write_item(seen.folder, other_item, tensors))


def test_the_seconds_of_a_video_move_positions_beyond_its_rows(tmp_path: Path) -> None:
    """Qwen3-Omni's videos have no time stamps. All other kinds of items move positions by at most their rows."""
    make_omni_model(tmp_path / "model")
    items, config = OmniItems(tmp_path / "model", tmp_path / "media"), read_model_config(tmp_path / "model")
    reader = RequestMedia(FolderReader(tmp_path / "media"), config)
    video, clip = items.video(3, 4, 4, seconds=10.0), items.clip(100)
    assert video.advance == 261.0 > video.rows
    taken = [video, items.video_with_sound(3, 2, 4, frames=250), clip, items.image(4, 6)]
    for item in taken:
        [[found]] = reader.of_prompts([[(item.digest, 1)]], [[5, *item.ids.tolist(), 6]])
        assert found == Media(item, 1, 1 + item.rows)
    for item, changes in ((video, {"advance": 262.5}), (video, {"advance": float("inf")}), (clip, {"advance": 14.0})):
        tensors = FolderReader(tmp_path / "media").tensors(item)
        wrong = write_item(tmp_path / "media", msgspec.structs.replace(item, digest="c" * 32, **changes), tensors)
        with pytest.raises(HttpError, match=f"that move positions by {wrong.advance:g}"):
            reader.of_prompts([[(wrong.digest, 0)]], [item.ids.tolist()])


def assert_refused(seen: Seen, config: ModelConfig, item: MediaItem) -> None:
    ids, media = seen.prompt(text(2), item, text(2))
    with pytest.raises(HttpError, match="the item was encoded for another model"):
        RequestMedia(FolderReader(seen.folder), config).of_prompts([entries(media)], [ids])


def test_files_that_are_no_items_are_refused(seen: Seen, config: ModelConfig) -> None:
    reader = RequestMedia(FolderReader(seen.folder), config)
    item = seen.image(2, 2, seed=78)
    whole = (seen.folder / item.digest).read_bytes()
    path: Path = seen.folder / ("d" * 32)
    for data in (
        b"",
        b"RLXMEDIA",
        whole[:40],
        b"x" * 100,
        whole[:8] + b"\xff" * 4 + whole[12:],
        whole[:12] + b"\0" * 900,
        whole.replace(b"uint8", b"uintX"),
    ):
        path.write_bytes(data)
        with pytest.raises(HttpError) as refused:
            reader.of_prompts([[("d" * 32, 0)]], [text(9)])
        assert refused.value.status == 400


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)
DIGESTS = st.sampled_from(["0" * 32, "F" * 32, "../" + "0" * 29, "/dev/zero", "..", "", "\0" * 32]) | st.text(
    max_size=40
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(JUNK | st.lists(st.none() | st.lists(st.tuples(DIGESTS, st.integers(-(2**70), 2**70)), min_size=1), max_size=2))
def test_whatever_is_sent_is_taken_as_text_or_refused(seen: Seen, config: ModelConfig, media: Any) -> None:
    reader = RequestMedia(FolderReader(seen.folder), config)
    body = json.dumps({"input_ids": text(9), "media": media}).encode()
    found = None
    with suppress(HttpError):
        found = parse_body(body, model=config, media=reader)
    assert found is None or found.media == [[]]

"""Tests thumbnails of audio: people see a small picture of the features, and a reward gets the features."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relax_core.contracts.media_file import write_item
from relax_core.contracts.reward import RewardInput
from relax_core.data.media.item_encoder import clip_item
from relax_core.data.media.media_trial_main import TRIAL_AUDIO
from relax_core.rollout.thumbnails import Thumbnails


def test_a_sound_is_shown_by_its_features_and_a_reward_gets_them(tmp_path: Path) -> None:
    features = np.full((128, 100), -1.5, np.float32)
    features[20] = 1.0  # a low tone
    (tmp_path / "media").mkdir()
    item = write_item(tmp_path / "media", *clip_item(TRIAL_AUDIO, features, 1.0))
    Thumbnails(tmp_path / "shown", tmp_path / "media").add(item)
    for thread in threading.enumerate():
        if thread.name == "thumbnail":
            thread.join(30)
    (file,) = (tmp_path / "shown").iterdir()
    assert file.name == f"00-audio-{item.digest[:8]}.png"
    with Image.open(file) as picture:
        rows = np.asarray(picture.convert("L")).astype(int).mean(axis=1)
    assert rows.argmax() == 127 - 20, "high frequencies are at the top"
    given = RewardInput(
        response="low", stopped=True, answer="low", row={}, media=[item], media_folder=str(tmp_path / "media")
    )
    np.testing.assert_array_equal(given.features(0), features)
    with pytest.raises(ValueError, match=r"media\[0\] is \[audio 1.0 s\], which has no frames, only features"):
        given.frames(0)

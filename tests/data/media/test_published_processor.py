"""Compares our ids and patches with transformers' Qwen3-VL processor on frames of the right size."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from relax_core.data.media.item_encoder import Encoded, image_item, video_item
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.architecture import PatchSettings
from relax_core.families.tiny_configs import processor_files, tiny_config
from relax_core.families.tower_passes import patches_of
from relax_core.tools.tiny_text import build_tokenizer
from tests.contracts.engine.harness import ROOT, SGLANG_PYTHON
from tests.data.media import published_processor

pytestmark = pytest.mark.sglang
FPS, NUMBERS = 7.5, [0, 4, 9, 13, 17, 22, 26]  # an odd number of frames: the last frame is repeated


def _settings() -> PatchSettings:
    config = tiny_config("tiny_qwen3_vl")
    image = processor_files()["preprocessor_config.json"]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return PatchSettings(
        patch_size=image["patch_size"],
        temporal_patch_size=image["temporal_patch_size"],
        merge_size=image["merge_size"],
        mean=tuple(255 * mean for mean in image["image_mean"]),
        std=tuple(255 * deviation for deviation in image["image_std"]),
        **{name: config[name] for name in names},
    )


def _placed(prompt: list[int], items: list[Encoded]) -> list[int]:
    """Returns the prompt with each placeholder replaced by its item's ids."""
    ids = list(prompt)
    for item, _ in items:
        (token,) = item.placeholder
        at = ids.index(token)
        ids[at : at + 1] = item.ids.tolist()
    return ids


def test_ids_and_patches_are_those_of_the_processor(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    settings = _settings()
    side = settings.patch_size * settings.merge_size
    picture = random.integers(0, 256, (2 * side, 3 * side, 3), dtype=np.uint8)
    frames = random.integers(0, 256, (len(NUMBERS), side, 2 * side, 3), dtype=np.uint8)
    given, answer = tmp_path / "given.npz", tmp_path / "answer.npz"
    np.savez(given, picture=picture, frames=frames, numbers=NUMBERS, fps=FPS)
    build_tokenizer(vision=True).save_pretrained(tmp_path)
    command = [SGLANG_PYTHON, published_processor.__file__, ROOT, tmp_path, given, answer]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(answer)

    tokenizer = PromptTokenizer(tmp_path)
    video = video_item(settings, frames, NUMBERS, fps=FPS, height=side, width=2 * side, tokenize=tokenizer.encode_plain)
    image = image_item(settings, picture, height=2 * side, width=3 * side)
    prompt = tokenizer.encode(published_processor.MESSAGES)  # type: ignore[arg-type]
    assert found["input_ids"][0].tolist() == _placed(prompt, [video, image])
    assert found["image_grid_thw"][0].tolist() == image[0].grid
    assert found["video_grid_thw"][0].tolist() == video[0].grid
    assert np.array_equal(found["pixel_values"], patches_of(image[1]["frames"], settings).numpy())
    assert np.array_equal(found["pixel_values_videos"], patches_of(video[1]["frames"], settings).numpy())

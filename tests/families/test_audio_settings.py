"""Tests the settings of an audio tower: from both file layouts, compared with transformers, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import WhisperFeatureExtractor

from relax_core.contracts.family import Audio, Family
from relax_core.families.audio_tower import read_audio_tower

AUDIO = Audio(
    prefix="thinker.audio_tower.",
    model="transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeAudioEncoder",
    config="transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe:Qwen3OmniMoeAudioEncoderConfig",
    shapes=lambda config: {"ln_post.weight": (config["d_model"],)},
)
FAMILY = Family(name="hears", audio=AUDIO)
CONFIG: dict[str, Any] = {
    "audio_token_id": 151675,
    "audio_start_token_id": 151669,
    "audio_end_token_id": 151670,
    "audio_config": {
        "num_mel_bins": 128, "n_window": 50, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
    },
}  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_the_settings_of_a_published_folder_are_read(tmp_path: Path) -> None:
    tower = read_audio_tower(FAMILY, CONFIG, model_folder=write(tmp_path))
    assert tower is not None
    assert dataclasses.asdict(tower.alone()) == {
        "sampling_rate": 16_000, "mel_bins": 128, "fft_size": 400, "hop_length": 160, "chunk_frames": 100,
        "audio_token_id": 151675, "audio_start_token_id": 151669, "audio_end_token_id": 151670,
    }  # fmt: skip
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1280, 32, 20, 5120)
    assert tower.weight_shapes == {"thinker.audio_tower.ln_post.weight": (1280,)}


def test_one_file_for_all_processors_is_read_too(tmp_path: Path) -> None:
    folder = write(tmp_path)
    file = folder / "preprocessor_config.json"
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": json.loads(file.read_text())}))
    before = read_audio_tower(FAMILY, CONFIG, model_folder=folder)
    file.write_text(json.dumps({"patch_size": 16}))  # the file has only the settings of images
    assert read_audio_tower(FAMILY, CONFIG, model_folder=folder) == before


def test_a_family_that_does_not_hear_has_no_tower(tmp_path: Path) -> None:
    assert read_audio_tower(Family(name="deaf"), {}, model_folder=tmp_path) is None
    assert Family(name="deaf").media_kinds == () and FAMILY.media_kinds == ("audio",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dither": 0.1}, "preprocessor_config.json dither=0.1: random noise"),
        ({"feature_size": 80}, "feature_size=80 with num_mel_bins=128"),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "feature_extractor_type=ClapFeatureExtractor: only"),
    ],
)
def test_another_extractor_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_audio_tower(FAMILY, CONFIG, model_folder=write(tmp_path, **changes))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither preprocessor_config.json nor processor_config.json there has"):
        read_audio_tower(FAMILY, CONFIG, model_folder=tmp_path)
    lacking = {key: value for key, value in CONFIG.items() if key != "audio_end_token_id"}
    with pytest.raises(ValueError, match="has no audio_end_token_id, which family hears needs"):
        read_audio_tower(FAMILY, lacking, model_folder=write(tmp_path))

"""Tests Qwen3-Omni's thinker: settings from a published folder, refusals, and the weights of both towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from relax_core.contracts.family import ExpertLayout, Experts
from relax_core.families.builtin_families import QWEN3_OMNI_MOE, read_architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import end_token_ids, language_values
from relax_core.families.rope import Rope
from relax_core.families.tiny_configs import tiny_omni_config, tiny_omni_files
from relax_core.tools.tiny_media import write_settings


def test_a_published_folder_is_read(tmp_path: Path) -> None:
    config = tiny_omni_config()
    write_settings(tmp_path, config, tiny_omni_files())
    architecture = folder_architecture(tmp_path, family="qwen3_omni_moe")
    assert (architecture.vocab_size, architecture.hidden_size, architecture.num_layers, architecture.max_positions) == (
        67,
        72,
        4,
        4096,
    )
    assert (
        architecture.rope == Rope(theta=1e4, sections=(4, 2, 2))
        and architecture.qk_norm
        and not architecture.tie_word_embeddings
    )
    assert (architecture.prefix, architecture.output_weight) == ("thinker.model.", "thinker.lm_head.weight")
    assert (
        architecture.experts == Experts(count=8, per_token=2, width=40, normalized=True)
        and architecture.expert_layout is ExpertLayout.apart
    )
    assert (
        architecture.is_copied("talker.model.norm.weight")
        and architecture.is_copied("code2wav.x")
        and not architecture.is_copied("thinker.talker.")
    )
    vision, audio = architecture.vision, architecture.audio
    assert vision is not None and audio is not None
    assert (vision.patch_size, vision.merge_size, vision.deepstack_layers) == (8, 2, 2)
    assert vision.frame_bounds and vision.positions_per_second == 13
    assert (vision.min_pixels, vision.max_pixels) == (32 * 32, 128 * 128)
    assert (vision.video_min_pixels, vision.video_max_pixels) == (32 * 32, 64 * 64)
    assert (audio.mel_bins, audio.chunk_frames, audio.rows_of_frames(730)) == (32, 100, 7 * 13 + 4)
    assert end_token_ids(tmp_path) == (language_values(config)["eos_token_id"],)


def test_a_folder_without_a_file_for_videos_has_the_bounds_of_the_published_processor(tmp_path: Path) -> None:
    write_settings(tmp_path, tiny_omni_config(), tiny_omni_files())
    (tmp_path / "video_preprocessor_config.json").unlink()
    vision = folder_architecture(tmp_path).vision
    assert vision is not None and (vision.video_min_pixels, vision.video_max_pixels) == (131_072, 786_432)


def test_a_folder_that_transformers_5_wrote_is_the_same(tmp_path: Path) -> None:
    config_class = transformers.Qwen3OmniMoeForConditionalGeneration.config_class
    config_class.from_dict(tiny_omni_config()).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new["thinker_config"]["text_config"]
    assert read_architecture(QWEN3_OMNI_MOE, new) == read_architecture(QWEN3_OMNI_MOE, tiny_omni_config())


def test_the_option_is_named_where_another_was_chosen(tmp_path: Path) -> None:
    write_settings(tmp_path, tiny_omni_config(), tiny_omni_files())
    with pytest.raises(ValueError, match=r"its model_type is .qwen3_omni_moe..*Use model=qwen3_omni\."):
        folder_architecture(tmp_path, family="qwen3_vl_moe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_5_omni"}, "Qwen2.5-Omni.*Use a folder of Qwen3-Omni, with model=qwen3_omni"),
        ({"model_type": "qwen3_omni_moe_thinker"}, "only the thinker.*published folder"),
        ({"thinker_config": None}, "config.json has no text_config, which family qwen3_omni_moe needs"),
    ],
)
def test_another_omni_folder_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_settings(tmp_path, tiny_omni_config() | change, tiny_omni_files())
    with pytest.raises(ValueError, match=message):
        folder_architecture(tmp_path)

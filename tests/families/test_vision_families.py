"""Tests vision families: settings from a published folder, refusals, and the tower's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from relax_core.contracts.family import DeltaNet, ExpertLayout, Experts
from relax_core.families.builtin_families import read_architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import end_token_ids, inner_config, language_values
from relax_core.families.rope import Rope
from relax_core.families.tiny_configs import (
    HYBRID,
    HYBRID_EXPERTS,
    VISION,
    VISION_EXPERTS,
    VISION_NAMES,
    processor_files,
    tiny_config,
    tiny_omni_config,
)
from relax_core.plan.model_dimensions import SHAPES
from relax_core.registry import find_family
from relax_core.tools.tiny_media import write_settings

PUBLISHED = sorted(file.stem for file in SHAPES.glob("Qwen3-VL-*.json"))
CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
OMNI, PUBLISHED_OMNI = "tiny_qwen3_omni", "Qwen3-Omni-30B-A3B"
SEEING = (VISION, VISION_EXPERTS)
HYBRIDS = (HYBRID, HYBRID_EXPERTS)


def config_of(name: str) -> dict[str, Any]:
    if name in VISION_NAMES or name == OMNI:
        return tiny_omni_config() if name == OMNI else tiny_config(name)
    values: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    del values["_source"]
    return values


def on_meta(config: dict[str, Any]) -> Any:
    model_class = getattr(transformers, CLASSES[config["model_type"]])
    with torch.device("meta"):
        return model_class(model_class.config_class.from_dict(dict(inner_config(config))))


@pytest.mark.parametrize("name", [*VISION_NAMES, OMNI, *PUBLISHED, PUBLISHED_OMNI])
def test_the_towers_weights_are_those_of_transformers(name: str) -> None:
    config = config_of(name)
    family = find_family(config["model_type"])
    outer = "thinker." if "omni" in config["model_type"] else ""
    theirs = {outer + weight: tuple(parameter.shape) for weight, parameter in on_meta(config).named_parameters()}
    assert family.vision is not None and (family.audio is not None) == bool(outer)
    for tower in filter(None, (family.vision, family.audio)):
        shapes = tower.shapes(inner_config(config)[tower.config_key])
        own = {weight: shape for weight, shape in theirs.items() if weight.startswith(tower.prefix)}
        assert {tower.prefix + part: shape for part, shape in shapes.items()} == own
        assert 0 < sum(part.startswith(tower.projector) for part in shapes) < len(own)


@pytest.mark.parametrize("name", SEEING)
def test_a_published_folder_is_read(tmp_path: Path, name: str) -> None:
    config = tiny_config(name)
    write_settings(tmp_path, config)
    architecture = folder_architecture(tmp_path, family=config["model_type"])
    assert (architecture.vocab_size, architecture.hidden_size, architecture.num_layers, architecture.max_positions) == (
        64,
        72,
        4,
        4096,
    )
    assert (
        architecture.rope == Rope(theta=1e4, sections=(4, 2, 2)) and architecture.qk_norm and not architecture.qkv_bias
    )
    assert architecture.prefix == "model.language_model." and architecture.tie_word_embeddings is (
        name == "tiny_qwen3_vl"
    )
    experts = Experts(count=8, per_token=2, width=40, normalized=True)
    layout = ExpertLayout.transposed if name.endswith("_moe") else ExpertLayout.apart
    assert (architecture.experts, architecture.expert_layout) == (experts if name.endswith("_moe") else None, layout)
    tower = architecture.vision
    assert tower is not None
    assert (tower.patch_size, tower.temporal_patch_size, tower.merge_size, tower.deepstack_layers) == (8, 2, 2, 2)
    assert (tower.min_pixels, tower.max_pixels) == (32 * 32, 128 * 128)
    assert tower.mean == tower.std == (127.5, 127.5, 127.5)
    assert end_token_ids(tmp_path) == (config["text_config"]["eos_token_id"],)


@pytest.mark.parametrize("name", SEEING)
def test_a_folder_that_transformers_5_wrote_is_the_same(tmp_path: Path, name: str) -> None:
    """Such a folder has rope_parameters and num_local_experts, and lacks norm_topk_prob."""
    config = tiny_config(name)
    family = find_family(config["model_type"])
    on_meta(config).config.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new["text_config"] and "rope_scaling" not in new["text_config"]
    new["text_config"].pop("norm_topk_prob", None)
    assert read_architecture(family, new) == read_architecture(family, config)


@pytest.mark.parametrize("name", [*SEEING, OMNI])
def test_no_two_axes_of_a_matrix_of_the_language_model_are_equal(name: str) -> None:
    for weight, parameter in on_meta(config_of(name)).named_parameters():
        if (".language_model." in weight or (name == OMNI and weight.startswith("model."))) and parameter.dim() > 1:
            assert parameter.shape[-1] != parameter.shape[-2], weight


@pytest.mark.parametrize("file", sorted(processor_files()))
def test_a_missing_processor_file_is_named(tmp_path: Path, file: str) -> None:
    write_settings(tmp_path, tiny_config("tiny_qwen3_vl"))
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=f"no {file} there.*Fetch the folder again"):
        folder_architecture(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False: qwen3_vl_moe computes norm_topk_prob=True only"),
        ({"rope_scaling": {"rope_type": "default"}}, "config.json has no mrope_section"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [4, 2, 2]}}, "rope_type=linear"),
        ({"rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": False}}, "interleaved sections only"),
        ({"num_experts_per_tok": 1}, "the router learns nothing"),
        ({"mlp_only_layers": [1]}, "qwen3_vl_moe computes models with experts in every layer only"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    config = tiny_config("tiny_qwen3_vl_moe")
    config["text_config"] |= changes
    with pytest.raises(ValueError, match=message):
        read_architecture(find_family("qwen3_vl_moe"), config)


def test_the_language_part_gives_the_sizes_of_the_language_model() -> None:
    config = tiny_config("tiny_qwen3_vl")
    values = language_values(config)
    assert values["vocab_size"] == 64 and values["image_token_id"] == config["image_token_id"]
    assert language_values({"vocab_size": 5}) == {"vocab_size": 5}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_folder_with_gated_delta_nets_is_read(tmp_path: Path, name: str) -> None:
    config = tiny_config(name)
    write_settings(tmp_path, config)
    architecture = folder_architecture(tmp_path, family=config["model_type"])
    assert architecture.delta_net == DeltaNet(key_heads=2, value_heads=4, key_dim=12, value_dim=16, kernel=4)
    assert (architecture.delta_layers, architecture.attention_layers) == ((0, 1, 2), (3,))
    assert (architecture.rope.part, architecture.rotary_dim, architecture.rope.sections) == (0.75, 12, (2, 2, 2))
    assert (
        architecture.output_gate
        and architecture.zero_centered
        and architecture.is_copied("mtp.fc.weight")
        and not architecture.is_copied("lm_head.weight")
    )
    experts = Experts(count=8, per_token=2, width=40, normalized=True, shared_width=48)
    assert architecture.experts == (experts if name == HYBRID_EXPERTS else None)
    del config["text_config"]["layer_types"]
    write_settings(tmp_path, config)
    assert folder_architecture(tmp_path).delta_layers == (0, 1, 2), "every fourth layer has attention"


@pytest.mark.parametrize("layout", [ExpertLayout.fused, ExpertLayout.apart])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_folders_tensors_tell_layout_and_dtypes(tmp_path: Path, layout: ExpertLayout, kind: torch.dtype) -> None:
    write_settings(tmp_path, tiny_config(HYBRID_EXPERTS))
    layer = "model.language_model.layers.0."
    experts = "mlp.experts.gate_up_proj" if layout is ExpertLayout.fused else "mlp.experts.3.up_proj.weight"
    stored = {
        layer + experts: torch.zeros(2, dtype=torch.bfloat16),
        "mtp.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(2),
        f"{layer}linear_attn.A_log": torch.zeros(4),
        f"{layer}linear_attn.dt_bias": torch.zeros(4, dtype=kind),
    }
    save_file(stored, tmp_path / "model.safetensors")
    architecture = folder_architecture(tmp_path)
    assert architecture.expert_layout is layout
    assert architecture.is_float32(f"{layer}linear_attn.A_log")
    assert architecture.is_float32(f"{layer}linear_attn.dt_bias") is (kind is torch.float32)
    assert not architecture.is_float32(f"{layer}linear_attn.out_proj.weight")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "4 of 4 layers are linear_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3: must be a multiple of linear_num_key_heads=2"),
        ({"attn_output_gate": False}, "attn_output_gate=False: qwen3_5 computes attn_output_gate=True only"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has .*sliding_attention"),
    ],
)
def test_another_hybrid_is_refused(changed: dict[str, Any], message: str) -> None:
    config = tiny_config(HYBRID)
    config["text_config"] |= changed
    with pytest.raises(ValueError, match=message):
        read_architecture(find_family("qwen3_5"), config)

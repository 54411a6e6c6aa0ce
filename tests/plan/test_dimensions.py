"""Compares parameter counts with transformers' models on torch's meta device, which needs no memory."""

from __future__ import annotations

import json

import pytest
import torch

from relax_core.families.hf_config import inner_config
from relax_core.families.tiny_configs import tiny_config
from relax_core.plan.model_dimensions import SHAPES, read_dimensions, shape_names

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def counted_by_transformers(values: dict[str, object]) -> dict[str, int]:
    """Returns the parameter counts of the towers, the experts, the embeddings, and all other parts."""
    import transformers

    model_class = getattr(transformers, CLASSES[str(values["model_type"])])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(inner_config(values))))
    parts = {
        "vision": 0,
        "audio": 0,
        "audio_projector": 0,
        "projector": 0,
        "routers": 0,
        "experts": 0,
        "embeddings": 0,
        "rest": 0,
    }
    for name, parameter in model.named_parameters():
        if name.startswith("audio_tower"):
            part = "audio_projector" if ".proj" in name and "layers" not in name else "audio"
        elif "visual" in name:
            part = "projector" if "merger" in name else "vision"
        elif ".experts." in name:
            part = "experts"
        elif name.endswith("mlp.gate.weight"):
            part = "routers"
        else:
            part = "embeddings" if "embed_tokens" in name or "lm_head" in name else "rest"
        parts[part] += parameter.numel()
    return parts


@pytest.mark.parametrize("name", shape_names())
def test_parameters_are_those_of_transformers(name: str) -> None:
    values = json.loads((SHAPES / f"{name}.json").read_text())
    found = read_dimensions(values, name=name)
    parts = counted_by_transformers({key: value for key, value in values.items() if key != "_source"})
    assert found.towers.get("vision", 0) == parts["vision"] + parts["projector"]
    if found.patches is not None:
        assert found.projector == parts["projector"]
    assert found.towers.get("audio", 0) == parts["audio"] + parts["audio_projector"]
    assert found.audio_projector == parts["audio_projector"]
    assert found.expert_parameters == parts["experts"]
    assert found.embedding_parameters == parts["embeddings"]
    assert found.router_parameters == parts["routers"]
    assert found.layer_parameters == parts["rest"] + parts["routers"]
    assert found.parameters == sum(parts.values())


@pytest.mark.parametrize(("hidden", "wide", "heads"), [(32, 56, 2), (64, 224, 4)])
def test_a_tower_keeps_as_much_as_autograd_saves(hidden: int, wide: int, heads: int) -> None:
    """Counts the storages (without weights) that autograd saves in transformers' tower for 1,024 patches."""
    from relax_core.tools.tiny_media import build_vision_model

    config = tiny_config("tiny_qwen3_vl")
    config["vision_config"] |= {"hidden_size": hidden, "intermediate_size": wide, "num_heads": heads, "depth": 6}
    tower = build_vision_model(config).model.visual
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(torch.randn(1024, 384), grid_thw=torch.tensor([[1, 32, 32]]))
    measured = sum(storage.nbytes() for at, storage in saved.items() if at not in weights) / 4 / 1024
    found = read_dimensions(config, name="tiny").patches
    assert found is not None
    assert found.values(recomputed=False) == pytest.approx(measured, rel=0.05)


def test_the_built_in_model() -> None:
    found = read_dimensions(tiny_config(), name="tiny")
    assert found.parameters == sum(counted_by_transformers(tiny_config()).values())
    assert found.cache_values_per_token == 2 * 2 * 2 * 16  # keys and values, layers, heads, head size


def test_the_built_in_models_vocabulary_is_its_tokenizers() -> None:
    from relax_core.tools.tiny_text import build_tokenizer

    assert tiny_config()["vocab_size"] == len(build_tokenizer())


def test_linear_attention_keeps_a_state_and_no_cache() -> None:
    """Qwen3.5-35B-A3B: 10 of 40 layers have keys and values, 30 have 32 x 128 x 128 numbers and a convolution state."""
    values = json.loads((SHAPES / "Qwen3.5-35B-A3B.json").read_text())
    found = read_dimensions(values, name="Qwen3.5-35B-A3B")
    assert found.cache_values_per_token == 2 * 10 * 2 * 256
    assert found.state_bytes_per_sample(2) == 30 * (4 * 32 * 128 * 128 + 2 * (2 * 16 * 128 + 32 * 128) * 3)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model_type": "phi3"}, "model_type='phi3' cannot be planned"),
        ({"model_type": "qwen3", "hidden_size": 64}, "folder: config.json has no num_attention_heads"),
    ],
)
def test_what_cannot_be_planned_is_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_dimensions(values, name="folder")

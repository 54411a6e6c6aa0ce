"""Makes tiny random models of every kind as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.family_models import make_family_model

VOCABULARY = 50
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1000000.0,
    "attn_implementation": "sdpa",
}


def make_model(folder: Path, *, tied: bool = True, seed: int = 0, **sizes: Any) -> Any:
    """Writes a Qwen3 to a folder and returns it, or a Qwen3-MoE if ``sizes`` has ``num_experts``.

    ``sizes`` are keys of the model's configuration. The experts' loads are far from even.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    settings = {**SHAPE, "tie_word_embeddings": tied, **sizes}
    model: Any = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))
        if "num_experts" in sizes
        else Qwen3ForCausalLM(Qwen3Config(**settings))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(parameter + noise if "norm" in name else noise)
    model.save_pretrained(folder)
    return model


def make_vision_model(folder: Path, name: str, *, seed: int = 0, **sizes: Any) -> Any:
    """Writes a random builtin vision model in its published layout, with processor files. ``sizes`` are for text."""
    from relax_core.families.tiny_configs import tiny_config
    from relax_core.tools.tiny_media import build_vision_model, write_published, write_settings

    torch.manual_seed(seed)
    config = tiny_config(name)
    config["text_config"] |= sizes
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    model = build_vision_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(folder, config)
    write_published(model, folder)
    return model


def make_models(folder: Path) -> None:
    """Makes models of four layers for layouts.

    untied, tied and moe are Qwen3 models, and biased is an untied Qwen2. They have a vocabulary of 51 tokens, which two
    ranks cannot split evenly. sees and sees_moe are Qwen3-VL models with 67 tokens, tied and untied. sees has eight
    layers, because the first chunk must have at least one layer per deepstack output of the vision tower.
    """
    sizes = {"vocab_size": VOCABULARY + 1, "intermediate_size": 96, "num_hidden_layers": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    make_model(folder / "untied", tied=False, **sizes)
    make_model(folder / "tied", tied=True, **sizes)
    make_model(folder / "moe", tied=False, **sizes, **experts)
    make_family_model(folder / "biased", "qwen2", **sizes)
    make_vision_model(folder / "sees", "tiny_qwen3_vl", vocab_size=VOCABULARY + 17, num_hidden_layers=8)
    make_vision_model(folder / "sees_moe", "tiny_qwen3_vl_moe", vocab_size=VOCABULARY + 17, num_experts=4)

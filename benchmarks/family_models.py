"""Makes tiny random models of all families as Hugging Face folders. Vocabulary, hidden, MLP and expert sizes differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 51  # odd: two tensor-parallel ranks pad it
POSITIONS = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 3,
    "pad_token_id": None,  # transformers computes no gradient for the embedding of a padding id
    "bos_token_id": None,
    "attn_implementation": "sdpa",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
# This scaling leaves some of a head's 8 frequencies unchanged, divides some, and interpolates some.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _theta(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# Name → (model_type, configuration keys in addition to SIZES). `head_dim` is derived if it is missing.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, **_theta(1e6)}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "tie_word_embeddings": False, **_theta(1e6), **EXPERTS}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, **_theta(1e6)}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, **_theta(1e6)}),
    "llama, llama3 rope": ("llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}),
    "llama, tied, linear rope": ("llama", {"tie_word_embeddings": True, "head_dim": 24, "rope_parameters": LINEAR}),
    "mistral": (
        "mistral",
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "head_dim": 24, "sliding_window": None, **_theta(1e6)},
    ),
}


def make_family_model(folder: Path | None, variant: str, *, seed: int = 0, **sizes: Any) -> Any:
    """Returns a float32 transformers model of a variant or of a model_type. ``sizes`` override configuration keys.
    Saves the model to ``folder`` if given. The model's distributions are far from flat, and every norm and bias has
    random values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = VARIANTS.get(variant, (variant, {}))
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SIZES, **settings, **sizes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.5 * noise if name.endswith("bias") else 0.1 * noise)
    if folder is not None:
        model.save_pretrained(folder)
    return model

"""What the engine reads from a Hugging Face folder's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in every layer. ``per_token``: experts that a token is routed to. ``width``: of one expert.
    ``normalized``: the weights of the chosen ones are made to add up to 1."""

    count: int
    per_token: int
    width: int
    normalized: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Qwen3's sizes. ``experts``: None for a dense one. ``eos_token_ids``: what ends a response unless the request
    says ignore_eos."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    experts: Experts | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ValueError for a folder without config.json, an unknown family, or an option that is not built."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--model-path {folder}: no config.json there; give a Hugging Face model folder")
    raw = json.loads(path.read_text())
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {family!r} is not a family of the embedded engine; known: {', '.join(FAMILIES)}. "
            f"Use engine=sglang for other families"
        )
    _refuse_unbuilt(path, raw)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(_rope(raw).get("rope_theta") or raw["rope_theta"]),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_positions=raw["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(folder, raw),
        experts=_experts(path, raw) if family == "qwen3_moe" else None,
    )


def _experts(path: Path, raw: dict[str, Any]) -> Experts:
    """transformers 5 writes num_local_experts, transformers 4 wrote num_experts."""
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise ValueError(
            f"{path}: decoder_sparse_step, mlp_only_layers: some layers are dense; the embedded engine has none such. "
            "Use engine=sglang"
        )
    return Experts(
        count=raw.get("num_local_experts") or raw["num_experts"],
        per_token=raw["num_experts_per_tok"],
        width=raw["moe_intermediate_size"],
        normalized=raw.get("norm_topk_prob", False),
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rope options; transformers 5 writes rope_parameters, transformers 4 wrote rope_scaling."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _refuse_unbuilt(path: Path, raw: dict[str, Any]) -> None:
    rope = _rope(raw)
    built = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "use_sliding_window": (raw.get("use_sliding_window", False), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for key, (value, wanted) in built.items():
        if value != wanted:
            raise ValueError(
                f"{path}: {key}={value!r} is not built into the embedded engine, only {wanted!r}; use engine=sglang"
            )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """As SGLang: the ids of config.json and of generation_config.json together."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    for source in (raw, json.loads(generation.read_text()) if generation.is_file() else {}):
        ids = source.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))

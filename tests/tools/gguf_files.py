"""Writes tiny GGUF files from Hugging Face models, with the names and the row order of the package gguf."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

BYTES = [chr(number) for number in (*range(33, 127), *range(161, 173), *range(174, 256))]
# GPT-2's byte alphabet: 68 bytes are mapped to U+0100 and up, so the space is U+0120.
ALPHABET = BYTES + [chr(256 + number) for number in range(68)]
SPECIAL = ["<|end|>", "<|user|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "a b", "Ġ Ġ"]
TOKENS = [*SPECIAL, *ALPHABET, *("".join(merge.split(" ")) for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe"}


def made_model(architecture: str, *, tied: bool = False) -> Any:
    """Returns a random transformers model of a few thousand parameters in float32."""
    import transformers

    name = CLASSES[architecture]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        tie_word_embeddings=tied,
        **(experts if architecture == "qwen3moe" else {}),
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def stored(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Returns the tensors of a model in the format of llama.cpp's converter, with the names of the package gguf."""
    kind = next(architecture_key for architecture_key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if name.endswith(".mlp.experts.gate_up_proj"):  # transformers 5 fuses the experts
            layer = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"], found[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
            continue
        if name.endswith(".mlp.experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = values
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
            shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        found[mapped] = values
    return found


def metadata(model: Any, architecture: str, *, pre: str = "qwen2") -> dict[str, Any]:
    config = model.config
    values = {
        "general.architecture": architecture,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 20000.0,
    }
    if architecture == "qwen3moe":
        values |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
    values = {
        key if "." in key and key.startswith("general") else f"{architecture}.{key}": values[key] for key in values
    }
    return values | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    *,
    quantise: Callable[[str, np.ndarray], gguf.GGMLQuantizationType | None] = lambda name, values: None,
) -> Path:
    """Writes a file. ``quantise`` returns the type of a tensor, or None for float32."""
    writer = gguf.GGUFWriter(path, str(values["general.architecture"]))
    for key, value in values.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            assert isinstance(value, Sequence)
            writer.add_array(key, value)
    for name, array in tensors.items():
        kind = quantise(name, array)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

"""Whether a folder's weights are those that its family trains, told from the files' headers alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from relax_core.train.models.family import Family, HfConfig, Part, WeightRule


def tensor_shape(rule: WeightRule, family: Family, hf_config: HfConfig) -> tuple[int, ...]:
    """Of the Hugging Face tensor."""
    shape, sizes = family.shape(hf_config), family.transformer_arguments(hf_config)
    hidden, attention = sizes["hidden_size"], shape.attention
    queries, keys = attention.query_heads * attention.head_dim, attention.groups * attention.head_dim
    width = sizes["moe_ffn_hidden_size"] if rule.expert else sizes["ffn_hidden_size"]
    module = rule.megatron.removesuffix(".weight").rsplit(".", 1)[-1]
    if module in ("q_layernorm", "k_layernorm"):
        return (attention.head_dim,)
    if module.endswith("layernorm"):
        return (hidden,)
    return {
        "word_embeddings": (shape.vocab_size, hidden),
        "output_layer": (shape.vocab_size, hidden),
        "linear_qkv": (queries if rule.part is Part.query else keys, hidden),
        "linear_proj": (hidden, queries),
        "linear_fc1": (width, hidden),
        "linear_fc2": (hidden, width),
        "router": (shape.moe.experts if shape.moe is not None else 0, hidden),
    }[module]


def stored_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...], Path]]:
    """(name, shape, file) of every tensor in a folder's ``*.safetensors``; ValueError for a file that is none."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, tuple(file.get_slice(name).get_shape()), path
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Fetch it again.") from error


def weight_problems(folder: Path, family: Family, hf_config: HfConfig) -> list[str]:
    """What keeps the trainer from loading the folder, in words; nothing where it can."""
    rules = {rule.hf: rule for rule in family.weights(hf_config)}
    ignored = family.ignored(hf_config)
    problems, found = [], dict[str, Path]()
    try:
        for name, shape, path in stored_shapes(folder):
            if name in ignored:
                continue
            if name not in rules:
                problems.append(f"{path}: {name} is no weight of family {family.name}.")
            elif name in found:
                problems.append(f"{path}: {name} is also in {found[name]}.")
            elif shape != (wanted := tensor_shape(rules[name], family, hf_config)):
                problems.append(f"{path}: {name} has shape {shape}; by config.json it is {wanted}.")
            found[name] = path
    except ValueError as error:
        return [*problems, str(error)]
    if not found:
        return [f"{folder}: no *.safetensors file there. Give a Hugging Face folder with weights."]
    missing = [name for name in rules if name not in found]
    if missing:
        problems.append(f"{folder}: {len(missing)} of {len(rules)} weights are missing: {', '.join(missing[:3])} …")
    return problems

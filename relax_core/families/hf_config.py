"""Reads a model's config.json for all other modules, and raises ValueError for sizes out of range.

Sizes are checked before they are used for counts or allocations. The bounds are far above the sizes of all published
models. They apply to all parts of the file, such as text_config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.contracts.untrusted_files import read_regular
from relax_core.contracts.untrusted_values import decode_json, shown

_LAYERS = (1, 1024)
_WIDTH = (1, 1 << 18)
_HEADS = (1, 4096)
_ROWS = (1, 1 << 24)
_SMALL = (1, 4096)
MAX_EXPERTS = 1 << 17  # summed over all layers

BOUNDS: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": _LAYERS,
    "hidden_size": _WIDTH,
    "intermediate_size": (0, 1 << 20),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": (1, 1 << 14),
    "vocab_size": _ROWS,
    "max_position_embeddings": (1, 1 << 30),
    "sliding_window": (0, 1 << 30),
    "full_attention_interval": _LAYERS,
    "num_experts": (0, 1 << 14),
    "num_local_experts": (0, 1 << 14),
    "num_experts_per_tok": (0, 1 << 14),
    "moe_intermediate_size": (0, 1 << 20),
    "shared_expert_intermediate_size": (0, 1 << 20),
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _SMALL,
    "linear_value_head_dim": _SMALL,
    "linear_conv_kernel_dim": _SMALL,
    "depth": _LAYERS,
    "num_heads": _HEADS,
    "out_hidden_size": _WIDTH,
    "in_channels": _SMALL,
    "patch_size": _SMALL,
    "temporal_patch_size": _SMALL,
    "spatial_merge_size": _SMALL,
    "num_position_embeddings": _ROWS,
    "d_model": _WIDTH,
    "encoder_layers": _LAYERS,
    "encoder_attention_heads": _HEADS,
    "encoder_ffn_dim": (1, 1 << 20),
    "downsample_hidden_size": _WIDTH,
    "num_mel_bins": _SMALL,
    "output_dim": _WIDTH,
    "max_source_positions": _ROWS,
    "n_window": _ROWS,
    "n_window_infer": _ROWS,
    "conv_chunksize": _ROWS,
}
_LISTS = {"layer_types": 1024, "deepstack_visual_indexes": 1024, "architectures": 64}  # entries at most


def size_problems(values: Mapping[str, Any], *, where: str = "") -> Iterator[str]:
    """Yields a problem (key, value, range) for each wrong size in a config.json and its parts."""
    for key, value in values.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from size_problems(value, where=f"{name}.")
        elif value is not None and key in BOUNDS:
            least, most = BOUNDS[key]
            sizes = value if isinstance(value, list) else [value]
            wrong = [size for size in sizes if type(size) is not int or not least <= size <= most]
            if wrong or len(sizes) > _LAYERS[1]:
                message = shown(wrong[0]) if wrong else f"{len(sizes)} values"
                yield f"{name}={message}: expected an integer from {least} to {most}"
        elif key in _LISTS and isinstance(value, list) and len(value) > _LISTS[key]:
            yield f"{name} has {len(value)} entries: expected at most {_LISTS[key]}"


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_TEXT_KEY = "text_config"
_INNER_KEY = "thinker_config"
MAX_JSON_BYTES = 16 << 20  # limit for the JSON files of a model folder, except tokenizer and weight index


def has_hf_config(model_folder: Path) -> bool:
    """Returns whether the folder has a config.json, like every Hugging Face model folder."""
    return (model_folder / CONFIG_FILE).exists()


def read_hf_config(model_folder: Path) -> dict[str, Any]:
    """Returns the content of a Hugging Face folder's config.json.

    Raises ValueError if the file is missing, if it is not a JSON object, or if a size is out of range.
    """
    if not has_hf_config(model_folder):
        raise ValueError(f"model.path={model_folder}: no config.json there. Give a Hugging Face model folder.")
    values = read_object(model_folder / CONFIG_FILE)
    if wrong := next(size_problems(values), None):
        raise ValueError(f"{model_folder / CONFIG_FILE}: {wrong}. Give the config.json that belongs to the weights.")
    return values


def inner_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the thinker's config if a config.json describes several models, otherwise the whole config."""
    inner = hf_config.get(_INNER_KEY)
    return inner if isinstance(inner, dict) else hf_config


def described_parts(hf_config: Mapping[str, Any]) -> list[str]:
    """Returns the models in the folder according to its config.json, except the thinker."""
    if not hf_config.get("enable_audio_output", True):
        return []
    return [part for part in ("talker", "code2wav") if hf_config.get(f"{part}_config") is not None]


def language_values(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of a config.json that describe the language model.

    A multimodal model has these values in text_config. Keys that text_config lacks come from the inner config, then
    from the whole file.
    """
    inner = inner_config(hf_config)
    text = inner.get(_TEXT_KEY)
    return {**hf_config, **inner, **text} if isinstance(text, dict) else {**hf_config, **inner}


def end_token_ids(model_folder: Path) -> tuple[int, ...]:
    """Returns the sorted ids that end a response, from config.json and generation_config.json, as in SGLang.

    A file may be missing. Raises ValueError for a file that is not a JSON object.
    """
    found: set[int] = set()
    for name in (CONFIG_FILE, GENERATION_FILE):
        file = model_folder / name
        ids = language_values(read_object(file)).get("eos_token_id") if file.exists() else None
        of_file = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if wrong := [token_id for token_id in of_file if type(token_id) is not int or token_id < 0]:
            raise ValueError(f"{file}: eos_token_id={shown(wrong[0])}: expected a token id, or a list of them.")
        found.update(of_file)
    return tuple(sorted(found))


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a model folder's file.

    Raises ValueError for other content, OSError for a missing file.
    """
    try:
        values = decode_json(read_regular(file, max_bytes=MAX_JSON_BYTES), Any)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object.")
    return values

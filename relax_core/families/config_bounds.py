"""The range of each size in a config.json; a model of another size is refused before anything is counted or allocated.

The bounds are far above every published model. They hold in every part of the file, such as text_config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_core.contracts.checks.foreign_values import shown

_LAYERS = (1, 1024)
_WIDTH = (1, 1 << 18)
_HEADS = (1, 4096)
_ROWS = (1, 1 << 24)
_SMALL = (1, 4096)
MOST_EXPERTS = 1 << 17  # of all layers together

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
    """Yields what is wrong with the sizes of a config.json and its parts, with key, value and the range."""
    for key, value in values.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from size_problems(value, where=f"{name}.")
        elif value is not None and key in BOUNDS:
            least, most = BOUNDS[key]
            sizes = value if isinstance(value, list) else [value]
            wrong = [one for one in sizes if type(one) is not int or not least <= one <= most]
            if wrong or len(sizes) > _LAYERS[1]:
                told = shown(wrong[0]) if wrong else f"{len(sizes)} values"
                yield f"{name}={told}: expected an integer from {least} to {most}"
        elif key in _LISTS and isinstance(value, list) and len(value) > _LISTS[key]:
            yield f"{name} has {len(value)} entries: expected at most {_LISTS[key]}"

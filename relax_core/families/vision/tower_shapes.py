"""Names and shapes of the weights of Qwen3's vision towers, from their part of config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax_core.contracts.family import HfConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MergerNames:
    """Holds the names of a merger's norm and its two matrices, and of the list of the mergers of deepstack."""

    norm: str
    first: str
    second: str
    deepstack: str


VL_MERGER = MergerNames(norm="norm", first="linear_fc1", second="linear_fc2", deepstack="deepstack_merger_list")
OMNI_MERGER = MergerNames(norm="ln_q", first="mlp.0", second="mlp.2", deepstack="merger_list")


def qwen3_vl_vision_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-VL's tower by their names behind the tower's prefix."""
    return _vision_shapes(config, VL_MERGER)


def qwen3_omni_vision_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-Omni's tower by their names behind the tower's prefix."""
    return _vision_shapes(config, OMNI_MERGER)


def _vision_shapes(config: HfConfig, names: MergerNames) -> dict[str, Shape]:
    hidden, wide, out = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    patch = (config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    merged = hidden * config["spatial_merge_size"] ** 2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (hidden, config["in_channels"], *patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (config["num_position_embeddings"], hidden),
    }
    for index in range(config["depth"]):
        block = f"blocks.{index}."
        shapes |= norm_shapes(f"{block}norm1", hidden)
        shapes |= norm_shapes(f"{block}norm2", hidden)
        shapes |= linear_shapes(f"{block}attn.qkv", hidden, 3 * hidden)
        shapes |= linear_shapes(f"{block}attn.proj", hidden, hidden)
        shapes |= linear_shapes(f"{block}mlp.linear_fc1", hidden, wide)
        shapes |= linear_shapes(f"{block}mlp.linear_fc2", wide, hidden)
    for merger, norm in _mergers(config, names, hidden=hidden, merged=merged):
        shapes |= norm_shapes(f"{merger}.{names.norm}", norm)
        shapes |= linear_shapes(f"{merger}.{names.first}", merged, merged)
        shapes |= linear_shapes(f"{merger}.{names.second}", merged, out)
    return shapes


def _mergers(config: HfConfig, names: MergerNames, *, hidden: int, merged: int) -> Iterator[tuple[str, int]]:
    """Yields the name of each merger and the width of its norm, which deepstack applies after merging."""
    yield "merger", hidden
    for level in range(len(config.get("deepstack_visual_indexes") or ())):
        yield f"{names.deepstack}.{level}", merged


def norm_shapes(name: str, width: int) -> dict[str, Shape]:
    """Returns the shapes of a norm's weight and bias by name."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """Returns the shapes of a matrix and its bias by name."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

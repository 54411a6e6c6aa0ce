"""Names and shapes of the weights of Qwen3-VL's vision tower, from its part of config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.contracts.family import HfConfig

Shape = tuple[int, ...]


def qwen3_vision_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the tower's weights by their names behind the tower's prefix, in the module's order."""
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
        shapes |= _norm(f"{block}norm1", hidden)
        shapes |= _norm(f"{block}norm2", hidden)
        shapes |= _linear(f"{block}attn.qkv", hidden, 3 * hidden)
        shapes |= _linear(f"{block}attn.proj", hidden, hidden)
        shapes |= _linear(f"{block}mlp.linear_fc1", hidden, wide)
        shapes |= _linear(f"{block}mlp.linear_fc2", wide, hidden)
    for merger, norm in _mergers(config, hidden=hidden, merged=merged):
        shapes |= _norm(f"{merger}.norm", norm)
        shapes |= _linear(f"{merger}.linear_fc1", merged, merged)
        shapes |= _linear(f"{merger}.linear_fc2", merged, out)
    return shapes


def _mergers(config: HfConfig, *, hidden: int, merged: int) -> Iterator[tuple[str, int]]:
    """Yields the name of each merger and the width of its norm, which deepstack applies after merging."""
    yield "merger", hidden
    for level in range(len(config.get("deepstack_visual_indexes") or ())):
        yield f"deepstack_merger_list.{level}", merged


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

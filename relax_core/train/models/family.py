"""What a model family is: data that says how a Hugging Face model looks in Megatron, both ways.

Nothing here imports torch, so that config validation can ask which families exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

HfConfig = Mapping[str, Any]


class Shard(Enum):
    """How tensor parallelism cuts a Megatron parameter; the value is Megatron's ``partition_dim``."""

    replicated = None
    column = 0  # output rows
    row = 1  # input columns


class Part(Enum):
    """Which part of a Megatron parameter one Hugging Face tensor is.

    Megatron fuses the three attention projections into one weight, interleaved by key-value group: for each group its
    query heads, its key head, its value head. It fuses the MLP's gate and up projections one above the other.
    """

    whole = "whole"
    query = "query"
    key = "key"
    value = "value"
    gate = "gate"
    up = "up"


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One Hugging Face tensor: ``hf`` is its name, ``megatron`` the parameter that holds it.

    Megatron names are those of a build without TransformerEngine. Their layer and expert numbers count over the whole
    model: the first says which pipeline stage has the parameter, the second which expert-parallel rank. ``shard`` is
    over the tensor-parallel ranks, or for an ``expert`` over the expert-tensor-parallel ones. ``vocabulary``: one row a
    token, and Megatron pads the rows up to a multiple of the ranks.
    """

    hf: str
    megatron: str
    shard: Shard
    part: Part = Part.whole
    expert: bool = False
    vocabulary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads of the attention; what places query, key and value in the fused weight."""

    query_heads: int
    groups: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """``layers``: numbers of the layers that have ``experts`` experts, of which a router gives ``top_k`` to a token."""

    experts: int
    top_k: int
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a family reads from config.json beside Megatron's own arguments."""

    vocab_size: int
    max_positions: int
    rotary_base: float
    tied_embeddings: bool
    attention: Attention
    moe: MixtureOfExperts | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    ``transformer_arguments``: keyword arguments for Megatron's TransformerConfig (plain values; ``activation`` is a
    name of torch.nn.functional). ``weights``: the map, in export order. Both raise ValueError for a config.json that
    the family cannot train. ``ignored``: Hugging Face names that a folder may hold and that carry nothing.
    """

    name: str
    hf_model_type: str
    shape: Callable[[HfConfig], ModelShape]
    transformer_arguments: Callable[[HfConfig], dict[str, Any]]
    weights: Callable[[HfConfig], tuple[WeightRule, ...]]
    ignored: Callable[[HfConfig], frozenset[str]]


def read_hf_config(model_folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder; ValueError if there is none."""
    path = model_folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={model_folder}: no config.json there. Give a Hugging Face model folder.")
    config = json.loads(path.read_text())
    assert isinstance(config, dict)
    return config

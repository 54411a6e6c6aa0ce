"""Maps each Hugging Face tensor of an architecture to a Megatron parameter.

It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from relax_core.families.architecture import OUTPUT_WEIGHT, Architecture

TOWER = "vision."  # The names of the tower's parameters in the first chunk of the model begin with this.


class Shard(Enum):
    """Says how tensor parallelism splits a Megatron parameter; the value is Megatron's ``partition_dim``."""

    replicated = None
    column = 0  # output rows
    row = 1  # input columns


class Part(Enum):
    """Says which part of a Megatron parameter one Hugging Face tensor is.

    Megatron fuses the three attention projections into one weight, interleaved by key-value group: each group has its
    query heads, its key head and its value head. It fuses their biases in the same order. It fuses the MLP's gate and
    up projections one above the other.
    """

    whole = "whole"
    query = "query"
    key = "key"
    value = "value"
    gate = "gate"
    up = "up"


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Maps one Hugging Face tensor ``hf`` to the parameter ``megatron`` that holds it.

    A rule's tensor is a matrix or a vector; a folder may hold another form (relax_core/train/hf/stored_weights.py).
    Megatron names are those of a build without TransformerEngine. Their layer and expert numbers count over the whole
    model: the layer number determines the pipeline stage and the expert number the expert-parallel rank. ``shard``
    applies to the tensor-parallel ranks, or for an ``expert`` to the expert-tensor-parallel ranks. If ``vocabulary`` is
    True the tensor has one row a token, and Megatron pads its rows to a multiple of the ranks.
    """

    hf: str
    megatron: str
    shard: Shard
    part: Part = Part.whole
    expert: bool = False
    vocabulary: bool = False

    @property
    def is_bias(self) -> bool:
        """Is True for a bias, which is a vector that is split and fused like the rows of its matrix."""
        return self.hf.endswith(".bias")


def weight_rules(architecture: Architecture) -> tuple[WeightRule, ...]:
    """Returns the rules of all weights in the order of an export.

    The order is: embedding, layers, final norm, the output weight if it is not tied, and the vision tower's weights.
    """
    return tuple(_rules(architecture))


def _rules(architecture: Architecture) -> Iterator[WeightRule]:
    prefix = architecture.prefix
    yield WeightRule(f"{prefix}embed_tokens.weight", "embedding.word_embeddings.weight", Shard.column, vocabulary=True)
    for index in range(architecture.num_layers):
        hf, megatron = f"{prefix}layers.{index}.", f"decoder.layers.{index}."
        yield from _attention_rules(hf, megatron, architecture)
        yield from _mlp_rules(hf + "mlp.", megatron + "mlp.", architecture)
    yield WeightRule(f"{prefix}norm.weight", "decoder.final_layernorm.weight", Shard.replicated)
    if not architecture.tie_word_embeddings:
        yield WeightRule(OUTPUT_WEIGHT, "output_layer.weight", Shard.column, vocabulary=True)
    if (tower := architecture.vision) is not None:
        for name in tower.weight_shapes:
            yield WeightRule(name, TOWER + name.removeprefix(tower.vision.prefix), Shard.replicated)


def _attention_rules(hf: str, megatron: str, architecture: Architecture) -> Iterator[WeightRule]:
    """Yields the rules of a layer without its MLP."""
    own, attention = hf + "self_attn.", megatron + "self_attention."
    yield WeightRule(hf + "input_layernorm.weight", megatron + "input_layernorm.weight", Shard.replicated)
    for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
        fused = f"{attention}linear_qkv.{kind}"
        yield WeightRule(f"{own}q_proj.{kind}", fused, Shard.column, Part.query)
        yield WeightRule(f"{own}k_proj.{kind}", fused, Shard.column, Part.key)
        yield WeightRule(f"{own}v_proj.{kind}", fused, Shard.column, Part.value)
    if architecture.qk_norm:
        yield WeightRule(own + "q_norm.weight", attention + "q_layernorm.weight", Shard.replicated)
        yield WeightRule(own + "k_norm.weight", attention + "k_layernorm.weight", Shard.replicated)
    yield WeightRule(own + "o_proj.weight", attention + "linear_proj.weight", Shard.row)
    yield WeightRule(hf + "post_attention_layernorm.weight", megatron + "pre_mlp_layernorm.weight", Shard.replicated)


def _mlp_rules(hf: str, megatron: str, architecture: Architecture) -> Iterator[WeightRule]:
    if architecture.experts is None:
        yield from _gated_rules(hf, megatron, expert=False)
        return
    yield WeightRule(hf + "gate.weight", megatron + "router.weight", Shard.replicated)
    rules = [
        list(_gated_rules(f"{hf}experts.{expert}.", f"{megatron}experts.local_experts.{expert}.", expert=True))
        for expert in range(architecture.experts.count)
    ]
    if architecture.fused_experts:  # The tensors that share one in the folder follow each other.
        yield from (rule for of_expert in rules for rule in of_expert[:2])
        yield from (of_expert[2] for of_expert in rules)
    else:
        yield from (rule for of_expert in rules for rule in of_expert)


def _gated_rules(hf: str, megatron: str, *, expert: bool) -> Iterator[WeightRule]:
    """Yields the rules of one gated MLP, whose names begin with ``hf`` and ``megatron``."""
    gate_up = megatron + "linear_fc1.weight"
    yield WeightRule(hf + "gate_proj.weight", gate_up, Shard.column, Part.gate, expert=expert)
    yield WeightRule(hf + "up_proj.weight", gate_up, Shard.column, Part.up, expert=expert)
    yield WeightRule(hf + "down_proj.weight", megatron + "linear_fc2.weight", Shard.row, expert=expert)


def tensor_shape(rule: WeightRule, architecture: Architecture) -> tuple[int, ...]:
    """Returns the shape of the whole tensor of a rule, which has at most two axes."""
    if rule.megatron.startswith(TOWER):
        assert architecture.vision is not None, "the rule is the tower's"
        rows, *rest = architecture.vision.weight_shapes[rule.hf]
        return (rows, math.prod(rest)) if rest else (rows,)
    one, experts = architecture, architecture.experts
    hidden, queries, keys = one.hidden_size, one.num_heads * one.head_dim, one.num_kv_heads * one.head_dim
    width = experts.width if rule.expert and experts is not None else one.intermediate_size
    module = rule.megatron.split(".")[-2]
    if module in ("q_layernorm", "k_layernorm"):
        return (one.head_dim,)
    if module.endswith("layernorm"):
        return (hidden,)
    shape = {
        "word_embeddings": (one.vocab_size, hidden),
        "output_layer": (one.vocab_size, hidden),
        "linear_qkv": (queries if rule.part is Part.query else keys, hidden),
        "linear_proj": (hidden, queries),
        "linear_fc1": (width, hidden),
        "linear_fc2": (hidden, width),
        "router": (experts.count if experts is not None else 0, hidden),
    }[module]
    return shape[:1] if rule.is_bias else shape

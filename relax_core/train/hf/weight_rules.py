"""Maps Hugging Face tensors to Megatron's parameters, and an architecture's sizes to a TransformerConfig.

This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from relax_core.contracts.family import DeltaNet, ExpertLayout
from relax_core.families.architecture import Architecture


def megatron_arguments(architecture: Architecture) -> dict[str, Any]:
    """Returns keyword arguments of TransformerConfig as plain values.

    ``activation`` is the name of a function in torch.nn.functional.
    """
    arguments: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "layernorm_epsilon": architecture.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": architecture.qk_norm,
        "gated_linear_unit": True,
        "activation": architecture.activation,
        "add_bias_linear": False,
    }
    if architecture.zero_centered:
        arguments["layernorm_zero_centered_gamma"] = True
    if architecture.output_gate:
        arguments["attention_output_gate"] = True
    if architecture.qkv_bias:
        arguments["add_qkv_bias"] = True
    if architecture.experts is not None:
        arguments |= {
            "num_moe_experts": architecture.experts.count,
            "moe_ffn_hidden_size": architecture.experts.width,
            "moe_router_topk": architecture.experts.per_token,
            "moe_router_score_function": "softmax",
            # Weights that are normalized over the chosen experts equal a softmax over the logits of these experts only.
            "moe_router_pre_softmax": not architecture.experts.normalized,
            "moe_token_dispatcher_type": "alltoall",
        }
        if architecture.experts.shared_width:
            arguments |= {
                "moe_shared_expert_intermediate_size": architecture.experts.shared_width,
                "moe_shared_expert_gate": True,
            }
    return arguments


VISION, AUDIO = "vision.", "audio."  # The names of the towers' parameters in the first chunk begin with these prefixes.


class Shard(Enum):
    """Names how tensor parallelism splits a Megatron parameter; the value is the parameter's ``partition_dim``."""

    replicated = None
    column = 0  # output rows
    row = 1  # input columns


class Part(Enum):
    """Names the part of a Megatron parameter that corresponds to one Hugging Face tensor.

    Megatron fuses the three attention projections into one weight, interleaved by key-value group: each group has its
    query heads, its key head and its value head. Megatron fuses the projections' biases in the same order. It stacks
    the rows of the MLP's gate projection and up projection.

    The gated delta net's input projection stacks each rank's queries, keys, values, output gate, writing strength and
    decay (``net_…``). The convolution's weight stacks the channels of the queries, keys and values.
    """

    whole = "whole"
    query = "query"
    key = "key"
    value = "value"
    gate = "gate"
    up = "up"
    net_query = "net_query"
    net_key = "net_key"
    net_value = "net_value"
    net_gate = "net_gate"
    net_strength = "net_strength"
    net_decay = "net_decay"


NET_PARTS = (Part.net_query, Part.net_key, Part.net_value, Part.net_gate, Part.net_strength, Part.net_decay)
CONVOLVED = NET_PARTS[:3]


def net_widths(net: DeltaNet) -> dict[Part, int]:
    """Returns the number of rows of each part of the gated delta net's input projection, in the projection's order."""
    widths = (net.keys, net.keys, net.values, net.values, net.value_heads, net.value_heads)
    return dict(zip(NET_PARTS, widths, strict=True))


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Maps one Hugging Face tensor ``hf`` to the Megatron parameter ``megatron``.

    A rule's tensor is a matrix or a vector; a folder may store it in another form
    (relax_core/train/hf/stored_weights.py). If a stored tensor has the rows of several rules, ``hf`` of these rules is
    the stored tensor's name, a slash and a suffix. Megatron names follow a build without TransformerEngine. Layers and
    experts in these names are numbered over the whole model. The layer number determines the pipeline stage, and the
    expert number determines the expert-parallel rank. ``shard`` applies to the tensor-parallel ranks; if ``expert`` is
    True, it applies to the expert-tensor-parallel ranks. If ``vocabulary`` is True the tensor has one row per token,
    and Megatron pads its rows to a multiple of the ranks.
    """

    hf: str
    megatron: str
    shard: Shard
    part: Part = Part.whole
    expert: bool = False
    vocabulary: bool = False

    @property
    def is_bias(self) -> bool:
        """Returns whether the tensor is a bias: a vector that is split and fused like the rows of its matrix."""
        return self.hf.endswith(".bias")


def weight_rules(architecture: Architecture) -> tuple[WeightRule, ...]:
    """Returns the rules of all weights in the order of an export.

    The order is: embedding, layers, final norm, output weight (unless tied), vision tower, audio tower.
    """
    return tuple(_rules(architecture))


def _rules(architecture: Architecture) -> Iterator[WeightRule]:
    prefix = architecture.prefix
    yield WeightRule(f"{prefix}embed_tokens.weight", "embedding.word_embeddings.weight", Shard.column, vocabulary=True)
    for index in range(architecture.num_layers):
        hf, megatron = f"{prefix}layers.{index}.", f"decoder.layers.{index}."
        yield WeightRule(hf + "input_layernorm.weight", megatron + "input_layernorm.weight", Shard.replicated)
        if index in architecture.delta_layers:
            yield from _delta_net_rules(hf + "linear_attn.", megatron + "self_attention.")
        else:
            yield from _attention_rules(hf + "self_attn.", megatron + "self_attention.", architecture)
        yield WeightRule(
            hf + "post_attention_layernorm.weight", megatron + "pre_mlp_layernorm.weight", Shard.replicated
        )
        yield from _mlp_rules(hf + "mlp.", megatron + "mlp.", architecture)
    yield WeightRule(f"{prefix}norm.weight", "decoder.final_layernorm.weight", Shard.replicated)
    if not architecture.tie_word_embeddings:
        yield WeightRule(architecture.output_weight, "output_layer.weight", Shard.column, vocabulary=True)
    if (tower := architecture.vision) is not None:
        for name in tower.weight_shapes:
            yield WeightRule(name, VISION + name.removeprefix(tower.vision.prefix), Shard.replicated)
    if (ears := architecture.audio) is not None:
        for name in ears.weight_shapes:
            yield WeightRule(name, AUDIO + name.removeprefix(ears.audio.prefix), Shard.replicated)


def _attention_rules(own: str, attention: str, architecture: Architecture) -> Iterator[WeightRule]:
    """Yields the rules of an attention layer; their names begin with ``own`` and ``attention``."""
    for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
        fused = f"{attention}linear_qkv.{kind}"
        yield WeightRule(f"{own}q_proj.{kind}", fused, Shard.column, Part.query)
        yield WeightRule(f"{own}k_proj.{kind}", fused, Shard.column, Part.key)
        yield WeightRule(f"{own}v_proj.{kind}", fused, Shard.column, Part.value)
    if architecture.qk_norm:
        yield WeightRule(own + "q_norm.weight", attention + "q_layernorm.weight", Shard.replicated)
        yield WeightRule(own + "k_norm.weight", attention + "k_layernorm.weight", Shard.replicated)
    yield WeightRule(own + "o_proj.weight", attention + "linear_proj.weight", Shard.row)


def _delta_net_rules(hf: str, megatron: str) -> Iterator[WeightRule]:
    """Yields the rules of a gated delta net; their names begin with ``hf`` and ``megatron``."""
    into = megatron + "in_proj.weight"
    for part in CONVOLVED:
        yield WeightRule(f"{hf}in_proj_qkv.weight/{part.value}", into, Shard.column, part)
    for name, part in (("z", Part.net_gate), ("b", Part.net_strength), ("a", Part.net_decay)):
        yield WeightRule(f"{hf}in_proj_{name}.weight", into, Shard.column, part)
    for part in CONVOLVED:
        yield WeightRule(f"{hf}conv1d.weight/{part.value}", megatron + "convolution", Shard.column, part)
    for name in ("A_log", "dt_bias"):
        yield WeightRule(hf + name, megatron + name, Shard.column)
    yield WeightRule(hf + "norm.weight", megatron + "out_norm", Shard.replicated)
    yield WeightRule(hf + "out_proj.weight", megatron + "out_proj.weight", Shard.row)


def _mlp_rules(hf: str, megatron: str, architecture: Architecture) -> Iterator[WeightRule]:
    if architecture.experts is None:
        yield from _gated_rules(hf, megatron, expert=False)
        return
    yield WeightRule(hf + "gate.weight", megatron + "router.weight", Shard.replicated)
    rules = [
        list(_gated_rules(f"{hf}experts.{expert}.", f"{megatron}experts.local_experts.{expert}.", expert=True))
        for expert in range(architecture.experts.count)
    ]
    # Tensors that the folder fuses must be adjacent.
    if architecture.expert_layout is not ExpertLayout.apart:
        yield from (rule for of_expert in rules for rule in of_expert[:2])
        yield from (of_expert[2] for of_expert in rules)
    else:
        yield from (rule for of_expert in rules for rule in of_expert)
    if architecture.experts.shared_width:
        yield from _gated_rules(hf + "shared_expert.", megatron + "shared_experts.", expert=False)
        gate = megatron + "shared_experts.gate_weight"
        yield WeightRule(hf + "shared_expert_gate.weight", gate, Shard.replicated)


def _gated_rules(hf: str, megatron: str, *, expert: bool) -> Iterator[WeightRule]:
    """Yields the rules of one gated MLP; their names begin with ``hf`` and ``megatron``."""
    gate_up = megatron + "linear_fc1.weight"
    yield WeightRule(hf + "gate_proj.weight", gate_up, Shard.column, Part.gate, expert=expert)
    yield WeightRule(hf + "up_proj.weight", gate_up, Shard.column, Part.up, expert=expert)
    yield WeightRule(hf + "down_proj.weight", megatron + "linear_fc2.weight", Shard.row, expert=expert)


def tensor_shape(rule: WeightRule, architecture: Architecture) -> tuple[int, ...]:
    """Returns the shape of a rule's whole tensor: one or two axes."""
    if rule.megatron.startswith((VISION, AUDIO)):
        rows, *rest = architecture.tower_shapes[rule.hf]
        return (rows, math.prod(rest)) if rest else (rows,)
    arch, experts = architecture, architecture.experts
    hidden, queries, keys = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    width = arch.intermediate_size
    if experts is not None:
        width = experts.width if rule.expert else experts.shared_width
    module = rule.megatron.split(".")[-2]
    if ".linear_attn." in rule.hf and arch.delta_net is not None:
        return _net_shape(rule, arch.delta_net, hidden)
    if module in ("q_layernorm", "k_layernorm"):
        return (arch.head_dim,)
    if module.endswith("layernorm"):
        return (hidden,)
    shape = {
        "word_embeddings": (arch.vocab_size, hidden),
        "output_layer": (arch.vocab_size, hidden),
        "linear_qkv": (queries * (1 + arch.output_gate) if rule.part is Part.query else keys, hidden),
        "linear_proj": (hidden, queries),
        "linear_fc1": (width, hidden),
        "linear_fc2": (hidden, width),
        "router": (experts.count if experts is not None else 0, hidden),
        "shared_experts": (1, hidden),
    }[module]
    return shape[:1] if rule.is_bias else shape


def _net_shape(rule: WeightRule, net: DeltaNet, hidden: int) -> tuple[int, ...]:
    """Returns the shape of a rule's tensor in a gated delta net."""
    name = rule.megatron.split("self_attention.")[1]
    if rule.part in NET_PARTS:
        return (net_widths(net)[rule.part], hidden if name == "in_proj.weight" else net.kernel)
    if name == "out_proj.weight":
        return (hidden, net.values)
    return (net.value_dim,) if name == "out_norm" else (net.value_heads,)

"""Dense Qwen3: RMSNorm, grouped-query attention with normed queries and keys, SwiGLU; tied or untied embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from relax_core.train.models.family import Attention, Family, HfConfig, ModelShape, Part, Shard, WeightRule


def qwen3_shape(config: HfConfig) -> ModelShape:
    """Of config.json; qwen3_moe.py adds the experts."""
    rotary = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    return ModelShape(
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rotary_base=rotary.get("rope_theta") or config["rope_theta"],
        tied_embeddings=config["tie_word_embeddings"],
        attention=Attention(
            query_heads=heads,
            groups=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ),
    )


def check_attention(config: HfConfig, *, family: str) -> None:
    """ValueError for settings of config.json that would need other code; nothing may be trained as something else."""
    rotary = config.get("rope_parameters") or {}
    rope_type = rotary.get("rope_type", "default")
    if config.get("rope_scaling") or rope_type != "default":
        raise ValueError(f"config.json rope_type={rope_type}: {family} trains plain rotary embeddings only.")
    for key, only in (("attention_bias", False), ("use_sliding_window", False), ("attention_dropout", 0)):
        if config.get(key, only) != only:
            raise ValueError(f"config.json {key}={config[key]}: {family} trains {key}={only} only.")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json hidden_act={config['hidden_act']}: {family} trains hidden_act=silu only.")


def qwen3_arguments(config: HfConfig) -> dict[str, Any]:
    """Of everything but the experts."""
    attention = qwen3_shape(config).attention
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": attention.query_heads,
        "num_query_groups": attention.groups,
        "kv_channels": attention.head_dim,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
    }


def _transformer_arguments(config: HfConfig) -> dict[str, Any]:
    check_attention(config, family="qwen3")
    return qwen3_arguments(config)


def attention_rules(index: int) -> tuple[WeightRule, ...]:
    """A layer without its MLP."""
    hf, megatron = f"model.layers.{index}.", f"decoder.layers.{index}."
    qkv = megatron + "self_attention.linear_qkv.weight"
    return (
        WeightRule(hf + "input_layernorm.weight", megatron + "input_layernorm.weight", Shard.replicated),
        WeightRule(hf + "self_attn.q_proj.weight", qkv, Shard.column, Part.query),
        WeightRule(hf + "self_attn.k_proj.weight", qkv, Shard.column, Part.key),
        WeightRule(hf + "self_attn.v_proj.weight", qkv, Shard.column, Part.value),
        WeightRule(hf + "self_attn.q_norm.weight", megatron + "self_attention.q_layernorm.weight", Shard.replicated),
        WeightRule(hf + "self_attn.k_norm.weight", megatron + "self_attention.k_layernorm.weight", Shard.replicated),
        WeightRule(hf + "self_attn.o_proj.weight", megatron + "self_attention.linear_proj.weight", Shard.row),
        WeightRule(hf + "post_attention_layernorm.weight", megatron + "pre_mlp_layernorm.weight", Shard.replicated),
    )


def gated_mlp_rules(hf: str, megatron: str, *, expert: bool = False) -> tuple[WeightRule, ...]:
    """Of one gated MLP, whose names begin so."""
    gate_up = megatron + "linear_fc1.weight"
    return (
        WeightRule(hf + "gate_proj.weight", gate_up, Shard.column, Part.gate, expert=expert),
        WeightRule(hf + "up_proj.weight", gate_up, Shard.column, Part.up, expert=expert),
        WeightRule(hf + "down_proj.weight", megatron + "linear_fc2.weight", Shard.row, expert=expert),
    )


def decoder_rules(config: HfConfig, layer: Callable[[int], Iterable[WeightRule]]) -> tuple[WeightRule, ...]:
    """Embedding, every ``layer``, final norm and, where it is not tied, the output weight."""
    rules = [WeightRule("model.embed_tokens.weight", "embedding.word_embeddings.weight", Shard.column, vocabulary=True)]
    for index in range(config["num_hidden_layers"]):
        rules += layer(index)
    rules.append(WeightRule("model.norm.weight", "decoder.final_layernorm.weight", Shard.replicated))
    if not config["tie_word_embeddings"]:
        rules.append(WeightRule("lm_head.weight", "output_layer.weight", Shard.column, vocabulary=True))
    return tuple(rules)


def _layer(index: int) -> tuple[WeightRule, ...]:
    mlp = gated_mlp_rules(f"model.layers.{index}.mlp.", f"decoder.layers.{index}.mlp.")
    return (*attention_rules(index), *mlp)


def _weights(config: HfConfig) -> tuple[WeightRule, ...]:
    return decoder_rules(config, _layer)


def tied_output(config: HfConfig) -> frozenset[str]:
    """Some writers store the tied output weight a second time."""
    return frozenset({"lm_head.weight"} if config["tie_word_embeddings"] else ())


QWEN3 = Family(
    name="qwen3",
    hf_model_type="qwen3",
    shape=qwen3_shape,
    transformer_arguments=_transformer_arguments,
    weights=_weights,
    ignored=tied_output,
)

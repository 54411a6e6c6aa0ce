"""Qwen3-MoE: Qwen3's attention, and in every layer experts of which a softmax router gives each token the best few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_core.train.models.family import Family, HfConfig, MixtureOfExperts, ModelShape, Shard, WeightRule
from relax_core.train.models.qwen3 import (
    attention_rules,
    check_attention,
    decoder_rules,
    gated_mlp_rules,
    qwen3_arguments,
    qwen3_shape,
    tied_output,
)


def _experts(config: HfConfig) -> int:
    """transformers 5 writes ``num_local_experts``, older ones ``num_experts``."""
    experts = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    assert isinstance(experts, int)
    return experts


def _shape(config: HfConfig) -> ModelShape:
    moe = MixtureOfExperts(
        experts=_experts(config),
        top_k=config["num_experts_per_tok"],
        layers=tuple(range(config["num_hidden_layers"])),
    )
    return replace(qwen3_shape(config), moe=moe)


def _check_experts(config: HfConfig) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"config.json mlp_only_layers={config.get('mlp_only_layers')}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step', 1)}: qwen3_moe trains models with experts in every layer only "
            "(mlp_only_layers=[], decoder_sparse_step=1)."
        )
    experts, top_k = _experts(config), config["num_experts_per_tok"]
    if not 1 <= top_k <= experts:
        raise ValueError(f"config.json num_experts_per_tok={top_k}: must be 1 to {experts}, the number of experts.")
    if top_k == 1 and config["norm_topk_prob"]:
        raise ValueError(
            "config.json num_experts_per_tok=1 with norm_topk_prob=true: each weight is then 1, so the router "
            "learns nothing. qwen3_moe trains it with norm_topk_prob=false only."
        )


def _transformer_arguments(config: HfConfig) -> dict[str, Any]:
    check_attention(config, family="qwen3_moe")
    _check_experts(config)
    return {
        **qwen3_arguments(config),
        "num_moe_experts": _experts(config),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # Weights that are normalised over the chosen experts are a softmax over the logits of these alone.
        "moe_router_pre_softmax": not config["norm_topk_prob"],
        "moe_token_dispatcher_type": "alltoall",
    }


def _weights(config: HfConfig) -> tuple[WeightRule, ...]:
    def layer(index: int) -> tuple[WeightRule, ...]:
        hf, megatron = f"model.layers.{index}.mlp.", f"decoder.layers.{index}.mlp."
        rules = [*attention_rules(index), WeightRule(hf + "gate.weight", megatron + "router.weight", Shard.replicated)]
        for expert in range(_experts(config)):
            rules += gated_mlp_rules(
                f"{hf}experts.{expert}.", f"{megatron}experts.local_experts.{expert}.", expert=True
            )
        return tuple(rules)

    return decoder_rules(config, layer)


QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    shape=_shape,
    transformer_arguments=_transformer_arguments,
    weights=_weights,
    ignored=tied_output,
)

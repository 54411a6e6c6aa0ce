"""Translates an architecture into arguments of Megatron's TransformerConfig.

It imports no torch.
"""

from __future__ import annotations

from typing import Any

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
            # Weights that are normalized over the chosen experts are a softmax over the logits of these experts alone.
            "moe_router_pre_softmax": not architecture.experts.normalized,
            "moe_token_dispatcher_type": "alltoall",
        }
        if architecture.experts.shared_width:
            arguments |= {
                "moe_shared_expert_intermediate_size": architecture.experts.shared_width,
                "moe_shared_expert_gate": True,
            }
    return arguments

"""Qwen3.5 for text only, in the format of transformers' Qwen3_5ForCausalLM, with a gated delta net.

python -m relax_core model=folder model.family=examples/plugins/qwen3_5_text.py model.path=/models/My-Qwen3.5-Text
"""

from __future__ import annotations

from relax_core.contracts.family import DeltaNet, Family, HfConfig, RequiredValue


def delta_net(config: HfConfig) -> DeltaNet:
    """Returns the sizes of the layers that config.json's layer_types calls linear_attention."""
    return DeltaNet(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
    )


def check(config: HfConfig) -> None:
    """Raises ValueError if the number of value heads is not a multiple of the key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise ValueError(
            f"config.json linear_num_value_heads={values}: must be a multiple of linear_num_key_heads={keys}."
        )


SPEC = Family(
    name="qwen3_5_text",  # config.json's model_type
    summary="Qwen3.5 that reads text only.",
    qk_norm=True,
    only=(RequiredValue("attention_bias", False, "no bias of the attention is computed"),),
    check=check,
    delta_net=delta_net,
    output_gate=True,  # the query projection also computes a gate for the attention's output
    zero_centered=True,  # a norm multiplies by 1 + its weight
    rotary_part=0.25,  # a quarter of each head is rotated unless config.json sets another part
    float32=("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"),
)

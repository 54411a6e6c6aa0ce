"""ByteDance's Seed-OSS: a decoder like Llama's, with biases on the query, key and value projections.

python -m relax_core model=folder model.family=examples/plugins/seed_oss.py model.path=/models/Seed-OSS-36B-Instruct
"""

from __future__ import annotations

from relax_core.contracts.family import Family, HfConfig, RequiredValue


def check(config: HfConfig) -> None:
    """Raises ValueError if the number of heads is not a multiple of the key-value heads."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"config.json num_attention_heads={heads}, num_key_value_heads={kv_heads}: the first must be a multiple of "
            "the second."
        )


SPEC = Family(
    name="seed_oss",  # config.json's model_type
    summary="Seed-OSS: biases on query, key and value; a separate output matrix.",
    qkv_bias=True,
    only=(
        RequiredValue("attention_bias", True, "query, key and value always add a bias"),
        RequiredValue("attention_out_bias", False, "no bias of the attention's output projection is computed"),
        RequiredValue("mlp_bias", False, "no bias of the MLP is computed"),
        RequiredValue("residual_dropout", 0, "nothing is dropped while training"),
    ),
    check=check,
)

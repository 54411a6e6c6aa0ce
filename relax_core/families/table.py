"""Relax's own model families, which relax_core/registry.py finds by name; `read_architecture` serves every family."""

from __future__ import annotations

from relax_core.contracts.family import Experts, Family, HfConfig, Only, Vision
from relax_core.families.architecture import Architecture
from relax_core.families.rope import read_rope
from relax_core.families.vision.tower_shapes import qwen3_vision_shapes

COMMON = (
    Only("hidden_act", "silu", "no other activation is computed"),
    Only("attention_dropout", 0, "nothing is dropped while training"),
)
FULL_ATTENTION = Only(
    "use_sliding_window",
    False,
    "attention goes over the whole context; with false the folder is the same model for contexts of at most "
    "sliding_window tokens",
)
NO_ATTENTION_BIAS = Only("attention_bias", False, "no bias of the attention's output projection is computed")


def read_architecture(family: Family, config: HfConfig) -> Architecture:
    """Returns the architecture that a config.json of ``family`` describes.

    Its vision tower is not read here, because it needs more files than this one
    (`relax_core/families/vision/tower_settings.py`). Raises ValueError for a missing key, and for a model that would
    need other code, so that no model is trained as a different one.
    """
    config = text_config(family, config)
    for only in (*COMMON, *family.only):
        given = config.get(only.key)
        if given is not None and given != only.value:
            raise ValueError(
                f"config.json {only.key}={given}: {family.name} computes {only.key}={only.value} only: {only.why}."
            )
    sliding = set(config.get("layer_types") or ()) - {"full_attention"}
    if sliding:
        raise ValueError(
            f"config.json layer_types has {', '.join(sorted(sliding))}: {family.name} computes full_attention only."
        )
    try:
        if family.check is not None:
            family.check(config)
        return _described(family, config)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}, which family {family.name} needs.") from error


def text_config(family: Family, config: HfConfig) -> HfConfig:
    """Returns the part of a config.json that describes the language model.

    transformers writes tie_word_embeddings into the outer part, which decides.
    """
    if family.text_key is None:
        return config
    inner = config.get(family.text_key)
    if not isinstance(inner, dict):
        raise ValueError(f"config.json has no {family.text_key}, which family {family.name} needs.")
    tied = config.get("tie_word_embeddings")
    return inner if tied is None else inner | {"tie_word_embeddings": tied}


def _described(family: Family, config: HfConfig) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope = read_rope(config, family=family.name)
    if family.vision is not None and rope.sections is None:
        raise KeyError("mrope_section")
    return Architecture(
        family=family.name,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", family.tied_by_default)),
        max_positions=config["max_position_embeddings"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=None if family.experts is None else family.experts(config),
        prefix=family.prefix,
        fused_experts=family.fused_experts,
    )


def _qwen3_experts(config: HfConfig) -> Experts:
    """Reads the experts. transformers 5 writes ``num_local_experts``, older versions wrote ``num_experts``."""
    count = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    return Experts(
        count=count,
        per_token=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        normalized=config.get("norm_topk_prob", False),
    )


def _qwen3_vl_experts(config: HfConfig) -> Experts:
    """Reads the experts of a family whose router always scales the weights of the chosen ones to a sum of 1."""
    return _qwen3_experts({**config, "norm_topk_prob": True})


def _check_qwen3_experts(config: HfConfig) -> None:
    _check_experts(_qwen3_experts(config), config, family="qwen3_moe")


def _check_qwen3_vl_experts(config: HfConfig) -> None:
    _check_experts(_qwen3_vl_experts(config), config, family="qwen3_vl_moe")


def _check_experts(experts: Experts, config: HfConfig, *, family: str) -> None:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"config.json mlp_only_layers={config.get('mlp_only_layers')}, decoder_sparse_step="
            f"{config.get('decoder_sparse_step', 1)}: {family} computes models with experts in every layer only "
            "(mlp_only_layers=[], decoder_sparse_step=1)."
        )
    if not 1 <= experts.per_token <= experts.count:
        raise ValueError(
            f"config.json num_experts_per_tok={experts.per_token}: must be 1 to {experts.count}, the number of experts."
        )
    if experts.per_token == 1 and experts.normalized:
        raise ValueError(
            "config.json num_experts_per_tok=1 with norm_topk_prob=true: each weight is then 1, so the router "
            f"learns nothing. {family} trains it with norm_topk_prob=false only."
        )


def _check_mistral_window(config: HfConfig) -> None:
    """Refuses a sliding window that is shorter than the context.

    Without the key, transformers uses one of 4096 tokens.
    """
    window, positions = config.get("sliding_window", 4096), config["max_position_embeddings"]
    if window is not None and window < positions:
        absent = "" if "sliding_window" in config else " (which transformers takes where the key is absent)"
        raise ValueError(
            f"config.json sliding_window={window}{absent} with max_position_embeddings={positions}: mistral computes "
            "attention over the whole context only. Mistral-7B has no window from v0.2 on (sliding_window=null); with "
            f"max_position_embeddings={window} in config.json this folder is the same model, for contexts of at most "
            f"{window} tokens."
        )


LLAMA = Family(
    name="llama",
    summary="Llama 3, 3.1, 3.2 (text), and older ones of the same form",
    only=(NO_ATTENTION_BIAS, Only("mlp_bias", False, "no bias of the MLP is computed")),
)
MISTRAL = Family(name="mistral", summary="Mistral-7B from v0.2 on, Mistral-Nemo", check=_check_mistral_window)
QWEN2 = Family(
    name="qwen2",
    summary="Qwen2 and Qwen2.5: query, key and value have biases",
    qkv_bias=True,
    only=(FULL_ATTENTION,),
)
QWEN3 = Family(
    name="qwen3", summary="Qwen3: normed queries and keys", qk_norm=True, only=(NO_ATTENTION_BIAS, FULL_ATTENTION)
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    summary="Qwen3-MoE: as Qwen3, with experts in every layer",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, FULL_ATTENTION),
    experts=_qwen3_experts,
    check=_check_qwen3_experts,
)

_QWEN3_VISION = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel"
_QWEN3_VISION_MOE = "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel"
_PROJECTOR = ("merger.", "deepstack_merger_list.")
QWEN3_VL = Family(
    name="qwen3_vl",
    summary="Qwen3-VL: Qwen3 that sees images and videos",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, FULL_ATTENTION),
    text_key="text_config",
    prefix="model.language_model.",
    vision=Vision(
        prefix="model.visual.",
        model=_QWEN3_VISION,
        config="transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLVisionConfig",
        shapes=qwen3_vision_shapes,
        projector=_PROJECTOR,
    ),
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    summary="Qwen3-VL-MoE: as Qwen3-VL, with experts in every layer",
    qk_norm=True,
    only=(
        NO_ATTENTION_BIAS,
        FULL_ATTENTION,
        Only("norm_topk_prob", True, "this family's router scales the weights of the chosen experts to a sum of 1"),
    ),
    experts=_qwen3_vl_experts,
    check=_check_qwen3_vl_experts,
    text_key="text_config",
    prefix="model.language_model.",
    vision=Vision(
        prefix="model.visual.",
        model=_QWEN3_VISION_MOE,
        config="transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe:Qwen3VLMoeVisionConfig",
        shapes=qwen3_vision_shapes,
        projector=_PROJECTOR,
    ),
    fused_experts=True,
)

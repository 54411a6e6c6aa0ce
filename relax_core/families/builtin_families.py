"""Defines the built-in model families, and `read_architecture` for all families.

The registry (relax_core/registry.py) finds a family by name.
"""

from __future__ import annotations

import math
from dataclasses import replace

from relax_core.contracts.family import Audio, DeltaNet, ExpertLayout, Experts, Family, HfConfig, RequiredValue, Vision
from relax_core.contracts.untrusted_values import shown
from relax_core.families.architecture import Architecture
from relax_core.families.audio_tower import qwen3_omni_audio_shapes
from relax_core.families.hf_config import MAX_EXPERTS, inner_config, size_problems
from relax_core.families.rope import read_rope
from relax_core.families.vision_tower import qwen3_omni_vision_shapes, qwen3_vl_vision_shapes

COMMON = (
    RequiredValue("hidden_act", "silu", "only this activation is implemented"),
    RequiredValue("attention_dropout", 0, "nothing is dropped while training"),
)
FULL_ATTENTION = RequiredValue(
    "use_sliding_window",
    False,
    "attention covers the whole context; with false the folder is the same model for contexts of at most "
    "sliding_window tokens",
)
_NORMALIZED = RequiredValue(
    "norm_topk_prob", True, "this family's router scales the weights of the chosen experts to a sum of 1"
)
_OUTPUT_GATE = RequiredValue("attn_output_gate", True, "this family has a gate on the attention's output")
NO_ATTENTION_BIAS = RequiredValue("attention_bias", False, "no bias of the attention's output projection is computed")


_FULL, _LINEAR = "full_attention", "linear_attention"  # kinds of layers in layer_types


def read_architecture(family: Family, config: HfConfig) -> Architecture:
    """Returns the architecture that a config.json of ``family`` describes.

    Towers need more files; `vision_tower.py` and `audio_tower.py` read them. Raises ValueError for a missing key or an
    unsupported value, because otherwise a different model would be trained.
    """
    try:
        return _read(family, text_config(family, config))
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}, which family {family.name} needs.") from error
    except (TypeError, AttributeError, ArithmeticError) as error:  # a value is a text or a list and not a number
        raise ValueError(f"config.json: family {family.name} needs a value of a different type: {error}.") from error


def _read(family: Family, config: HfConfig) -> Architecture:
    for only in (*COMMON, *family.only):
        given = config.get(only.key)
        if given is not None and given != only.value:
            raise ValueError(
                f"config.json {only.key}={given}: {family.name} computes {only.key}={only.value} only: {only.why}."
            )
    computed = {_FULL} if family.delta_net is None else {_FULL, _LINEAR}
    unknown = {str(kind) for kind in config.get("layer_types") or ()} - computed
    if unknown:
        raise ValueError(
            f"config.json layer_types has {shown(sorted(unknown))}: {family.name} computes "
            f"{' and '.join(sorted(computed))} only."
        )
    if wrong := next(size_problems(config), None):
        raise ValueError(f"config.json {wrong}.")
    if family.check is not None:
        family.check(config)
    found = _described(family, config)
    if found.experts is not None:
        _check_experts(found.experts, config, family=family.name)
    if found.experts is not None and found.num_layers * found.experts.count > MAX_EXPERTS:
        raise ValueError(
            f"config.json: {found.num_layers} layers with {found.experts.count} experts each: expected at most "
            f"{MAX_EXPERTS} experts in all."
        )
    for name, number in {
        "head_dim": found.head_dim,
        "rms_norm_eps": found.rms_norm_eps,
        "rope_theta": found.rope.theta,
    }.items():
        if not (isinstance(number, int | float) and 0 < number < math.inf):
            raise ValueError(f"config.json {name}={shown(number)}: expected a finite number above 0.")
    return found


def text_config(family: Family, config: HfConfig) -> HfConfig:
    """Returns the part of a config.json that describes the language model.

    transformers writes tie_word_embeddings into the outer part, so the outer value is used.
    """
    if family.text_key is None:
        return config
    around = inner_config(config)
    inner = around.get(family.text_key)
    if not isinstance(inner, dict):
        raise ValueError(f"config.json has no {family.text_key}, which family {family.name} needs.")
    tied = around.get("tie_word_embeddings")
    return inner if tied is None else inner | {"tie_word_embeddings": tied}


def _described(family: Family, config: HfConfig) -> Architecture:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope = read_rope(config, family=family.name, part=family.rotary_part)
    if family.vision is not None and rope.sections is None:
        raise KeyError("mrope_section")
    return Architecture(
        family=family.name,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        # If there is no dense MLP, transformers writes no width for it.
        intermediate_size=config["intermediate_size"] if family.experts is None else config.get("intermediate_size", 0),
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
        output_weight=family.output_weight,
        expert_layout=family.expert_layouts[0],
        delta_net=None if family.delta_net is None else family.delta_net(config),
        delta_layers=() if family.delta_net is None else _linear_layers(config),
        output_gate=family.output_gate,
        zero_centered=family.zero_centered,
        float32=family.float32,
        copied_prefixes=family.copied_prefixes,
    )


def _linear_layers(config: HfConfig) -> tuple[int, ...]:
    """Returns the layers with linear attention. Without layer_types, these are all layers except every fourth."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.get("full_attention_interval", 4)
        kinds = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(config["num_hidden_layers"])]
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def _qwen3_5_delta_net(config: HfConfig) -> DeltaNet:
    return DeltaNet(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
    )


def _check_qwen3_5(config: HfConfig) -> None:
    """Raises ValueError if all layers are of one kind, or if value heads are not a multiple of key heads."""
    linear, layers = _linear_layers(config), config["num_hidden_layers"]
    if not 0 < len(linear) < layers:
        raise ValueError(
            f"config.json layer_types: {len(linear)} of {layers} layers are {_LINEAR}. Qwen3.5 has both kinds; with "
            f"{_FULL} only, the folder is a Qwen3."
        )
    net = _qwen3_5_delta_net(config)
    if net.value_heads % net.key_heads:
        raise ValueError(
            f"config.json linear_num_value_heads={net.value_heads}: must be a multiple of linear_num_key_heads="
            f"{net.key_heads}."
        )


def _qwen3_5_experts(config: HfConfig) -> Experts:
    """Reads the experts and the shared expert; the router always scales the chosen experts' weights to a sum of 1."""
    shared = config.get("shared_expert_intermediate_size") or 0
    return replace(_qwen3_vl_experts(config), shared_width=shared)


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
    """Reads the experts of a family with a router that always scales the chosen experts' weights to a sum of 1."""
    return _qwen3_experts({**config, "norm_topk_prob": True})


def _qwen3_omni_experts(config: HfConfig) -> Experts:
    """Reads the experts.

    The router scales the chosen experts' weights to a sum of 1 unless config.json disables scaling.
    """
    return _qwen3_experts({"norm_topk_prob": True, **config})


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
    """Raises ValueError if the sliding window is shorter than the context.

    Without the key, transformers uses a window of 4096 tokens.
    """
    window, positions = config.get("sliding_window", 4096), config["max_position_embeddings"]
    if window is not None and window < positions:
        absent = "" if "sliding_window" in config else " (transformers' default)"
        raise ValueError(
            f"config.json sliding_window={window}{absent} with max_position_embeddings={positions}: mistral computes "
            "attention over the whole context only. Mistral-7B has no window from v0.2 on (sliding_window=null); with "
            f"max_position_embeddings={window} in config.json this folder is the same model, for contexts of at most "
            f"{window} tokens."
        )


LLAMA = Family(
    name="llama",
    summary="Llama 3, 3.1, 3.2 (text), and older models with the same architecture",
    only=(NO_ATTENTION_BIAS, RequiredValue("mlp_bias", False, "no bias of the MLP is computed")),
)
MISTRAL = Family(name="mistral", summary="Mistral-7B from v0.2 on, Mistral-Nemo", check=_check_mistral_window)
QWEN2 = Family(
    name="qwen2",
    summary="Qwen2 and Qwen2.5: query, key and value have biases",
    qkv_bias=True,
    only=(FULL_ATTENTION,),
)
QWEN3 = Family(
    name="qwen3", summary="Qwen3: normalized queries and keys", qk_norm=True, only=(NO_ATTENTION_BIAS, FULL_ATTENTION)
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    summary="Qwen3-MoE: Qwen3 with experts in every layer",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, FULL_ATTENTION),
    experts=_qwen3_experts,
)

_QWEN3_VISION = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel"
_QWEN3_VISION_MOE = "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe:Qwen3VLMoeVisionModel"
_PROJECTOR = ("merger.", "deepstack_merger_list.")
QWEN3_VL = Family(
    name="qwen3_vl",
    summary="Qwen3-VL: Qwen3 with images and videos",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, FULL_ATTENTION),
    text_key="text_config",
    prefix="model.language_model.",
    vision=Vision(
        prefix="model.visual.",
        model=_QWEN3_VISION,
        config="transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLVisionConfig",
        shapes=qwen3_vl_vision_shapes,
        projector=_PROJECTOR,
    ),
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    summary="Qwen3-VL-MoE: Qwen3-VL with experts in every layer",
    qk_norm=True,
    only=(
        NO_ATTENTION_BIAS,
        FULL_ATTENTION,
        _NORMALIZED,
    ),
    experts=_qwen3_vl_experts,
    text_key="text_config",
    prefix="model.language_model.",
    vision=Vision(
        prefix="model.visual.",
        model=_QWEN3_VISION_MOE,
        config="transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe:Qwen3VLMoeVisionConfig",
        shapes=qwen3_vl_vision_shapes,
        projector=_PROJECTOR,
    ),
    expert_layouts=(ExpertLayout.transposed,),
)

_QWEN3_5_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")
QWEN3_5 = Family(
    name="qwen3_5",
    summary="Qwen3.5: images and videos; a gated delta net in three of four layers",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, _OUTPUT_GATE),
    check=_check_qwen3_5,
    text_key="text_config",
    prefix="model.language_model.",
    vision=Vision(
        prefix="model.visual.",
        model="transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel",
        config="transformers.models.qwen3_5.configuration_qwen3_5:Qwen3_5VisionConfig",
        shapes=qwen3_vl_vision_shapes,
        projector=_PROJECTOR,
    ),
    delta_net=_qwen3_5_delta_net,
    output_gate=True,
    zero_centered=True,
    rotary_part=0.25,
    float32=_QWEN3_5_FLOAT32,
    copied_prefixes=("mtp.",),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    summary="Qwen3.5-MoE: Qwen3.5 with experts and a shared expert in every layer",
    only=(*QWEN3_5.only, _NORMALIZED),
    experts=_qwen3_5_experts,
    vision=Vision(
        prefix="model.visual.",
        model="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel",
        config="transformers.models.qwen3_5_moe.configuration_qwen3_5_moe:Qwen3_5MoeVisionConfig",
        shapes=qwen3_vl_vision_shapes,
        projector=_PROJECTOR,
    ),
    expert_layouts=(ExpertLayout.fused, ExpertLayout.apart),
)

_QWEN3_OMNI = "transformers.models.qwen3_omni_moe"
QWEN3_OMNI_MOE = Family(
    name="qwen3_omni_moe",
    summary="Qwen3-Omni: the thinker, a Qwen3-MoE with vision and audio; exports copy talker and code2wav unchanged",
    qk_norm=True,
    only=(NO_ATTENTION_BIAS, FULL_ATTENTION),
    experts=_qwen3_omni_experts,
    text_key="text_config",
    prefix="thinker.model.",
    output_weight="thinker.lm_head.weight",
    vision=Vision(
        prefix="thinker.visual.",
        model=f"{_QWEN3_OMNI}.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder",
        config=f"{_QWEN3_OMNI}.configuration_qwen3_omni_moe:Qwen3OmniMoeVisionEncoderConfig",
        shapes=qwen3_omni_vision_shapes,
        projector=("merger.", "merger_list."),
        seconds_key="position_id_per_seconds",
        frame_bounds=True,
        video_pixels=(128 * 32 * 32, 768 * 32 * 32),  # limits in transformers' Qwen3OmniMoeProcessor
    ),
    audio=Audio(
        prefix="thinker.audio_tower.",
        model=f"{_QWEN3_OMNI}.modeling_qwen3_omni_moe:Qwen3OmniMoeAudioEncoder",
        config=f"{_QWEN3_OMNI}.configuration_qwen3_omni_moe:Qwen3OmniMoeAudioEncoderConfig",
        shapes=qwen3_omni_audio_shapes,
        projector=("proj1.", "proj2."),
    ),
    copied_prefixes=("talker.", "code2wav."),
    option="qwen3_omni",
)

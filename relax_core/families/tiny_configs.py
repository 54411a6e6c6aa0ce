"""Defines sizes and tokens of the builtin models, and the settings files of the multimodal builtin models.

In a multimodal model the axes of a weight have different sizes, so tests notice a transposed weight.
"""

from __future__ import annotations

from typing import Any

STUDENT, TEACHER, EXPERTS = "tiny_qwen3", "tiny_qwen3_teacher", "tiny_qwen3_moe"
TOOLS = "tiny_qwen3_tools"
VISION, VISION_EXPERTS = "tiny_qwen3_vl", "tiny_qwen3_vl_moe"
HYBRID, HYBRID_EXPERTS = "tiny_qwen3_5", "tiny_qwen3_5_moe"
VISION_NAMES = (VISION, VISION_EXPERTS, HYBRID, HYBRID_EXPERTS)
OMNI = "tiny_qwen3_omni"
MODEL_NAMES = (STUDENT, TEACHER, EXPERTS, TOOLS, *VISION_NAMES, OMNI)
MAX_POSITIONS = 4096  # prompt and response tokens of one sample at most

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
AUDIO_START, AUDIO_END, AUDIO_PAD = AUDIO_TOKENS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
SPECIAL_TOKENS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
ROLES = ("user", "assistant", "system")
_CHARACTERS = " \n0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:'$"
# Tokens for tool calls in Hermes' format, and words that keep the calculator's episodes short. These are normal tokens,
# not special tokens, as in Qwen3.
_TOOL_CHARACTERS = '{}[]()"_<>|'
TOOL_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    '{"name": "',
    '", "arguments": ',
    '": ',
    ', "',
    '{"',
    "}}",
    *("multiply", "Returns", " the", " product", " of", " two", " whole", " numbers", " times ", "it is "),
)
_VISION_CHARACTERS = "<>|_"  # for a user's text that contains the name of a special token

_PATCHES = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
_PIXELS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor"}


def token_ids(*, vision: bool = False, audio: bool = False, tools: bool = False) -> dict[str, int]:
    """Returns the token ids by text; ``vision``, ``audio`` and ``tools`` select the model's further tokens."""
    if tools:
        return {
            token: index
            for index, token in enumerate((*SPECIAL_TOKENS, *ROLES, *_CHARACTERS, *_TOOL_CHARACTERS, *TOOL_TOKENS))
        }
    more = (*_VISION_CHARACTERS, *VISION_TOKENS, *(AUDIO_TOKENS if audio else ())) if vision else ()
    return {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ROLES, *_CHARACTERS, *more))}


def tiny_config(name: str = STUDENT) -> dict[str, Any]:
    """Returns a builtin model's config.json without creating the model."""
    if name == OMNI:
        return tiny_omni_config()
    if name in VISION_NAMES:
        if name in (HYBRID, HYBRID_EXPERTS):
            return _hybrid_model(experts=name == HYBRID_EXPERTS)
        return _vision_model(experts=name == VISION_EXPERTS)
    dense = {
        "model_type": "qwen3",
        "vocab_size": len(token_ids(tools=name == TOOLS)),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
    }
    if name != EXPERTS:
        return dense
    return dense | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }


def _vision_model(*, experts: bool) -> dict[str, Any]:
    """Returns a config.json in the published format of Qwen3-VL."""
    ids, kind = token_ids(vision=True), "qwen3_vl_moe" if experts else "qwen3_vl"
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        "vocab_size": len(ids),
        "hidden_size": 72,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<|im_end|>"],
        "dtype": "float32",
    }
    if experts:
        text |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if experts else "Qwen3VLForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids[VIDEO_PAD],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "tie_word_embeddings": not experts,
        "text_config": text,
        "vision_config": _tower(kind, out=text["hidden_size"]),
    }


def _hybrid_model(*, experts: bool) -> dict[str, Any]:
    """Returns a config.json in the published format of Qwen3.5; the last of four layers has attention."""
    model, kind = _vision_model(experts=experts), "qwen3_5_moe" if experts else "qwen3_5"
    text = {key: value for key, value in model["text_config"].items() if key not in _NOT_HYBRID} | {
        "model_type": f"{kind}_text",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_interleaved": True,
            "mrope_section": [2, 2, 2],
            "partial_rotary_factor": 0.75,
        },
    }
    if experts:
        text["shared_expert_intermediate_size"] = 48
        # With a pad token id, transformers sets the pad's embedding to zero and never trains it. A sampled pad would
        # then be a row of zeros in all three delta nets and their experts, and each norm multiplies the gradient of
        # such a row by 1,000.
        del text["pad_token_id"]
    tower = model["vision_config"] | {"model_type": kind, "deepstack_visual_indexes": []}
    name = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
    return model | {"architectures": [name], "model_type": kind, "text_config": text, "vision_config": tower}


_NOT_HYBRID = ("rope_theta", "rope_scaling", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")


def _tower(kind: str, *, out: int) -> dict[str, Any]:
    return {
        "model_type": kind,
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": _PATCHES["patch_size"],
        "temporal_patch_size": _PATCHES["temporal_patch_size"],
        "spatial_merge_size": _PATCHES["merge_size"],
        "out_hidden_size": out,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.02,
    }


def processor_files() -> dict[str, dict[str, Any]]:
    """Returns the settings files for images and videos by file name, in the published format of Qwen3-VL.

    An image has 4 to 64 rows, and a video at most 256.
    """
    image = {"size": _size(32 * 32, 128 * 128), "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {"size": _size(4 * 32 * 32, 32 * 64 * 64), "video_processor_type": "Qwen3VLVideoProcessor"}
    return {
        "preprocessor_config.json": {**_PATCHES, **_PIXELS, **image},
        "video_preprocessor_config.json": {**_PATCHES, **_PIXELS, **video},
    }


def _size(smallest: int, largest: int) -> dict[str, int]:
    return {"shortest_edge": smallest, "longest_edge": largest}  # Both count pixels, in spite of their names.


_HIDDEN = 72
_ROPE = {"rope_type": "default", "interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}


def tiny_omni_config() -> dict[str, Any]:
    """Returns the config.json with thinker, talker and code2wav; Relax computes only the thinker."""
    ids = token_ids(vision=True, audio=True)
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<pad>"],
        "tts_bos_token_id": ids["<|im_start|>"],
        "tts_eos_token_id": ids["<|im_end|>"],
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "audio_token_id": ids[AUDIO_PAD],
            "audio_start_token_id": ids[AUDIO_START],
            "audio_end_token_id": ids[AUDIO_END],
            "image_token_id": ids[IMAGE_PAD],
            "video_token_id": ids[VIDEO_PAD],
            "vision_start_token_id": ids[VISION_START],
            "vision_end_token_id": ids[VISION_END],
            "user_token_id": ids["user"],
            "position_id_per_seconds": 13,
            "seconds_per_chunk": 2,
            "text_config": _text(ids),
            "vision_config": _vision(),
            "audio_config": _audio(),
        },
        "talker_config": _talker(ids),
        "code2wav_config": _code2wav(),
    }


def tiny_omni_files() -> dict[str, dict[str, Any]]:
    """Returns the settings files for images, videos and sounds by file name.

    The published folder has no file for videos, but the default bounds are too large for this model. An image has 4 to
    64 rows, and a video frame has at most 16 rows. A sound has 13 rows per second and 32 feature values per frame.
    """
    settings = {
        "processor_class": "Qwen3OmniMoeProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 32 * 32,
        "max_pixels": 128 * 128,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 32,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "dither": 0.0,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    frames = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}  # Both count pixels, in spite of their names.
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "size": frames}
    return {"preprocessor_config.json": settings, "video_preprocessor_config.json": settings | video}


def _text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_text",
        "vocab_size": len(ids),
        "hidden_size": _HIDDEN,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10_000.0,
        "rope_scaling": dict(_ROPE),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _vision() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": _HIDDEN,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.02,
    }


def _audio() -> dict[str, Any]:
    """Returns the audio tower's config: 13 rows per second, as published, and attention within windows of 2 s."""
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 32,
        "d_model": 28,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 44,
        "downsample_hidden_size": 10,
        "output_dim": _HIDDEN,
        "n_window": 50,
        "n_window_infer": 200,
        "conv_chunksize": 500,
        "max_source_positions": 1500,
        "activation_function": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "scale_embedding": False,
        "initializer_range": 0.02,
    }


def _talker(ids: dict[str, int]) -> dict[str, Any]:
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6}
    return {
        "accept_hidden_layer": 2,
        "num_code_groups": 2,
        "thinker_hidden_size": _HIDDEN,
        "audio_token_id": ids[AUDIO_PAD],
        "audio_start_token_id": ids[AUDIO_START],
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids[VIDEO_PAD],
        "vision_start_token_id": ids[VISION_START],
        "position_id_per_seconds": 13,
        "spatial_merge_size": 2,
        "speaker_id": {"ethan": 1},
        "text_config": attention
        | {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": 20,
            "hidden_size": 24,
            "intermediate_size": 36,
            "num_hidden_layers": 1,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 14,
            "rope_theta": 10_000.0,
            "rope_scaling": _ROPE | {"mrope_section": [2, 1, 1]},
        },
        "code_predictor_config": attention
        | {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": 16,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 1,
            "num_code_groups": 2,
            "rope_theta": 10_000.0,
        },
    }


def _code2wav() -> dict[str, Any]:
    return {
        "model_type": "qwen3_omni_moe_code2wav",
        "codebook_size": 16,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_quantizers": 2,
        "decoder_dim": 16,
        "upsample_rates": [2, 2],
        "upsampling_ratios": [2, 2],
        "sliding_window": 8,
    }

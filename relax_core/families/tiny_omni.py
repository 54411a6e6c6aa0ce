"""Holds the config.json and the processor file of the builtin model that sees and hears, as Qwen3-Omni is published.

No two sizes are equal where a weight of the thinker has them as its axes: a transposed weight would go unnoticed.
"""

from __future__ import annotations

from typing import Any

from relax_core.families.tiny_configs import (
    AUDIO_END,
    AUDIO_PAD,
    AUDIO_START,
    IMAGE_PAD,
    MAX_POSITIONS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    token_ids,
)

_HIDDEN = 72
_ROPE = {"rope_type": "default", "interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}


def tiny_omni_config() -> dict[str, Any]:
    """Returns the config.json with thinker, talker and code2wav, of which Relax computes the thinker."""
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
    """Returns the settings of images, videos and sounds by the names of their files.

    The published folder has no file for videos, whose bounds are then too large for this model. An image has 4 to 64
    rows, and a frame of a video at most 16. A sound has 13 rows a second, and its features have 32 values a frame.
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
    """Its chunks of a second become 13 rows as in the published model; rows attend to the 2 seconds of a window."""
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

"""Qwen3-Omni's thinker without its talker, as transformers' Qwen3OmniMoeThinkerForConditionalGeneration saves it.

python -m relax_core model=folder model.family=examples/plugins/omni_thinker.py model.path=/models/My-Omni-Thinker
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from relax_core.contracts.family import Audio, Experts, Family, HfConfig, RequiredValue, Vision

CLASSES = "transformers.models.qwen3_omni_moe"
VISION_MODEL = f"{CLASSES}.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder"
VISION_CONFIG = f"{CLASSES}.configuration_qwen3_omni_moe:Qwen3OmniMoeVisionEncoderConfig"
AUDIO_MODEL = f"{CLASSES}.modeling_qwen3_omni_moe:Qwen3OmniMoeAudioEncoder"
AUDIO_CONFIG = f"{CLASSES}.configuration_qwen3_omni_moe:Qwen3OmniMoeAudioEncoderConfig"


def experts(config: HfConfig) -> Experts:
    """Returns the mixture of experts of every layer."""
    return Experts(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        normalized=config.get("norm_topk_prob", True),
    )


def shapes(model: str, config_class: str) -> Callable[[HfConfig], dict[str, tuple[int, ...]]]:
    """Returns a function that returns the shapes of a tower's weights by name, from a tower on the meta device."""

    def of_config(config: HfConfig) -> dict[str, tuple[int, ...]]:
        import torch

        keys = {name: value for name, value in config.items() if name not in ("model_type", "transformers_version")}
        with torch.device("meta"):
            tower = _named(model)(_named(config_class)(**keys))
        return {name: tuple(weight.shape) for name, weight in tower.named_parameters()}

    return of_config


def _named(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


SPEC = Family(
    name="qwen3_omni_moe_thinker",  # config.json's model_type
    summary="Qwen3-Omni's thinker alone: sees and hears.",
    qk_norm=True,
    only=(RequiredValue("attention_bias", False, "no bias of the attention is computed"),),
    experts=experts,
    text_key="text_config",  # the part of config.json that describes the decoder
    vision=Vision(
        prefix="visual.",
        model=VISION_MODEL,
        config=VISION_CONFIG,
        shapes=shapes(VISION_MODEL, VISION_CONFIG),
        projector=("merger.", "merger_list."),
        seconds_key="position_id_per_seconds",  # a video's rows have times and no time stamps
        frame_bounds=True,  # the bounds of pixels hold for each frame of a video
        video_pixels=(128 * 32 * 32, 768 * 32 * 32),  # for folders without video_preprocessor_config.json
    ),
    audio=Audio(
        prefix="audio_tower.",  # how the names of the tower's weights begin
        model=AUDIO_MODEL,
        config=AUDIO_CONFIG,
        shapes=shapes(AUDIO_MODEL, AUDIO_CONFIG),
        projector=("proj1.", "proj2."),  # what model.freeze=[projector] means
    ),
)

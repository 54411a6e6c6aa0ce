"""A company's own vision models: Qwen3-VL's vision tower with Qwen3's decoder under another model_type.

python -m relax_core model=folder model.family=examples/plugins/house_vl.py model.path=/models/House-VL-4B
"""

from __future__ import annotations

import importlib

from relax_core.contracts.family import Family, HfConfig, RequiredValue, Vision

MODEL = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel"
CONFIG = "transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLVisionConfig"


def shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tower's weights by name, from a tower on the meta device."""
    import torch

    (model, config_class) = (_named(path) for path in (MODEL, CONFIG))
    keys = {name: value for name, value in config.items() if name not in ("model_type", "transformers_version")}
    with torch.device("meta"):
        tower = model(config_class(**keys))
    return {name: tuple(weight.shape) for name, weight in tower.named_parameters()}


def _named(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


SPEC = Family(
    name="house_vl",  # config.json's model_type
    summary="House-VL: Qwen3-VL's tower, Qwen3's decoder.",
    qk_norm=True,
    only=(RequiredValue("attention_bias", False, "no bias of the attention is computed"),),
    text_key="text_config",  # the part of config.json that describes the decoder
    prefix="model.language_model.",  # how the names of the decoder's weights begin
    vision=Vision(
        prefix="model.visual.",  # how the names of the tower's weights begin
        model=MODEL,
        config=CONFIG,
        shapes=shapes,
        projector=("merger.", "deepstack_merger_list."),  # what model.freeze=[projector] means
        kinds=("image", "video"),
    ),
)

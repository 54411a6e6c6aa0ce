"""Divides a model's parameters into the parts that `model.freeze` names, and takes some of them out of training.

A parameter that is frozen has no gradient: Megatron's wrapper gives it no place in its buffers, and its optimizer keeps
no state of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from relax_core.config.choices import AUDIO, LANGUAGE, PROJECTOR, ROUTER, VISION
from relax_core.families.architecture import Architecture
from relax_core.train.hf.stored_weights import stored_weights
from relax_core.train.hf.weight_rules import AUDIO as AUDIO_PREFIX
from relax_core.train.hf.weight_rules import VISION as VISION_PREFIX
from relax_core.train.model.gpt import VALUE_HEAD

IN_TOWER = "in_tower"  # the attribute of the tower's parameters, by which the optimizer finds their learning rate


def part_of(name: str, architecture: Architecture) -> str | None:
    """Returns the part of a chunk's parameter ``name``, or None for a value head, which always trains."""
    if name.startswith(VALUE_HEAD):
        return None
    if name.startswith(VISION_PREFIX):
        assert architecture.vision is not None
        inner = name.removeprefix(VISION_PREFIX)
        return PROJECTOR if inner.startswith(architecture.vision.vision.projector) else VISION
    if name.startswith(AUDIO_PREFIX):
        assert architecture.audio is not None
        inner = name.removeprefix(AUDIO_PREFIX)
        return PROJECTOR if inner.startswith(architecture.audio.audio.projector) else AUDIO
    return ROUTER if ".mlp.router." in name else LANGUAGE


def frozen_weights(architecture: Architecture, frozen: Collection[str]) -> frozenset[str]:
    """Returns the Hugging Face names of the weights that belong to the ``frozen`` parts."""
    return frozenset(
        one.name
        for one in stored_weights(architecture)
        if all(part_of(rule.megatron, architecture) in frozen for rule in one.rules)
    )


def freeze_parts(chunks: Iterable[torch.nn.Module], frozen: Collection[str], architecture: Architecture) -> None:
    """Takes the parameters of the ``frozen`` parts out of training, and marks those of the towers.

    The call comes before Megatron's wrapper and optimizer, which leave out parameters that need no gradient.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            part = part_of(name, architecture)
            setattr(parameter, IN_TOWER, part in (VISION, AUDIO))
            if part in frozen:
                parameter.requires_grad_(False)

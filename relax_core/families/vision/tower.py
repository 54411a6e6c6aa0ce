"""Builds a tower from Hugging Face's own modules, and passes images and videos through a vision tower."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_core.families.architecture import AudioTower, VisionTower
from relax_core.families.vision.patches import patches_of


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """Holds what a tower gives for the feature rows of some items, item by item.

    ``features`` is ``[rows, hidden]``; ``deepstack`` has one such tensor for each of the first layers.
    """

    features: Tensor
    deepstack: tuple[Tensor, ...]


def build_tower(
    tower: VisionTower | AudioTower, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Returns the tower's module without weights, which the caller loads; its buffers are initialized."""
    classes = tower.vision if isinstance(tower, VisionTower) else tower.audio
    config = _named(classes.config)(**_own_keys(tower))
    config._attn_implementation = "sdpa"
    with torch.device(device):
        module: torch.nn.Module = _named(classes.model)(config)
    for parameter in module.parameters():  # The rotary frequencies and sinusoids, which are buffers, stay float32.
        parameter.data = parameter.data.to(dtype)
    return module


def pass_items(
    module: torch.nn.Module, tower: VisionTower, frames: Sequence[np.ndarray], grids: Sequence[Sequence[int]]
) -> TowerOutput:
    """Returns the tower's output for items whose frames are uint8 ``[frames, height, width, 3]``."""
    parameter = next(module.parameters())
    alike = [np.stack(list(some)) for _, some in groupby(frames, key=np.shape)]
    pixels = torch.cat([patches_of(some, tower, device=parameter.device) for some in alike]).to(parameter.dtype)
    grid = torch.tensor([list(one) for one in grids], dtype=torch.int64, device=parameter.device)
    output: Any = module(pixels, grid_thw=grid)
    return TowerOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def _own_keys(tower: VisionTower | AudioTower) -> dict[str, Any]:
    return {name: value for name, value in tower.config.items() if name not in ("model_type", "transformers_version")}


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

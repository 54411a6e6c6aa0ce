"""Passes what is seen and what is heard through the towers of a model, in the trainer as in the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.media import MediaItem
from relax_core.families.audio.audio_tower import pass_sounds
from relax_core.families.towers import Towers
from relax_core.families.vision.tower import pass_items


class TowerInputs(NamedTuple):
    """Holds what passes the towers, in the order of its items.

    ``frames`` are uint8 ``[frames, height, width, 3]`` with ``grids`` (time, height, width) in patches, one for each
    item that is seen; ``sounds`` are features, float32 ``[mel bins, frames]``, one for each item that is heard.
    """

    frames: Sequence[np.ndarray] = ()
    grids: Sequence[Sequence[int]] = ()
    sounds: Sequence[np.ndarray] = ()


def inputs_of(items: Sequence[MediaItem], tensors: Sequence[Mapping[str, np.ndarray]]) -> TowerInputs:
    """Returns what passes the towers of items, whose tensors are given."""
    return TowerInputs(
        frames=[one["frames"] for one in tensors if "frames" in one],
        grids=[item.grid for item, one in zip(items, tensors, strict=True) if "frames" in one],
        sounds=[one["features"] for one in tensors if "features" in one],
    )


def smallest_image(towers: Towers) -> TowerInputs:
    """Returns the smallest item that the vision tower takes."""
    tower = towers.vision
    assert tower is not None, "the model sees"
    side = tower.merge_size * tower.patch_size
    frames = np.zeros((tower.temporal_patch_size, side, side, 3), dtype=np.uint8)
    return TowerInputs(frames=[frames], grids=[[1, tower.merge_size, tower.merge_size]])


def smallest_sound(towers: Towers) -> TowerInputs:
    """Returns the smallest item that the audio tower takes: features that become one row."""
    assert towers.audio is not None, "the model hears"
    return TowerInputs(sounds=[np.zeros((towers.audio.mel_bins, 1), dtype=np.float32)])


def pass_towers(
    inputs: TowerInputs, towers: Towers, *, vision: torch.nn.Module | None, audio: torch.nn.Module | None
) -> Tensor:
    """Returns what the towers give, ``[1 + deepstack layers, features, hidden]``: what is seen, then what is heard.

    Entry 0 has the features of the rows, the others are added after the first layers of the language model, which is 0
    for what is heard. ``vision`` and ``audio`` are the towers' modules; each is needed where there are inputs for it.
    """
    outputs: list[Tensor] = []
    layers = 0 if towers.vision is None else towers.vision.deepstack_layers
    if inputs.frames:
        assert vision is not None and towers.vision is not None, "the model sees"
        seen = pass_items(vision, towers.vision, inputs.frames, inputs.grids)
        outputs.append(torch.stack([seen.features, *seen.deepstack]))
    if inputs.sounds:
        assert audio is not None and towers.audio is not None, "the model hears"
        heard = pass_sounds(audio, towers.audio, inputs.sounds)
        outputs.append(torch.stack([heard, *[torch.zeros_like(heard)] * layers]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

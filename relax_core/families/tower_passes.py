"""Builds vision and audio towers from Hugging Face's own modules, and runs their forward passes.

Trainer and embedded engine use the same passes. Patches are computed from uint8 frames and equal the patches of Hugging
Face's processor.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import AudioTower, VisionTower
from relax_core.families.towers import Towers


def patches_of(frames: np.ndarray, tower: VisionTower, *, device: torch.device | str = "cpu") -> Tensor:
    """Returns the patches of an item, float32 ``[patches, colours * frames * patch height * patch width]``.

    ``frames`` is uint8 ``[frames, height, width, 3]``. For several items of one shape it is ``[items, frames, height,
    width, 3]``, and the patches are in the order of the items. Height and width are multiples of patch size times merge
    size. If the number of frames is not a multiple of the temporal patch size, the last frame is repeated. The patches
    of one row are adjacent.
    """
    step, size, merge = tower.temporal_patch_size, tower.patch_size, tower.merge_size
    pixels = torch.from_numpy(np.array(frames)).to(device)  # a copy, because torch refuses read-only arrays
    if pads := -pixels.shape[-4] % step:
        pixels = torch.cat([pixels, *[pixels[..., -1:, :, :, :]] * pads], dim=-4)
    pixels = pixels.flatten(0, -4)
    mean = torch.tensor(tower.mean, dtype=torch.float32, device=device)
    std = torch.tensor(tower.std, dtype=torch.float32, device=device)
    values = (pixels.float() - mean) / std
    time, height, width = len(values) // step, values.shape[1] // size, values.shape[2] // size
    shape = (time, step, height // merge, merge, size, width // merge, merge, size, values.shape[3])
    # (time, row of rows, row of columns, patch in row (y, x), colour, frame, y, x)
    ordered = values.reshape(shape).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(time * height * width, -1)


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """Holds a tower's output for the feature rows of some items, item by item.

    ``features`` is ``[rows, hidden]``; ``deepstack`` has a tensor of this shape for each of the first layers.
    """

    features: Tensor
    deepstack: tuple[Tensor, ...]


def build_tower(
    tower: VisionTower | AudioTower, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """Returns the tower's module with initialized buffers; the caller loads the weights."""
    classes = tower.vision if isinstance(tower, VisionTower) else tower.audio
    config = _named(classes.config)(**_own_keys(tower))
    config._attn_implementation = "sdpa"
    with torch.device(device):
        module: torch.nn.Module = _named(classes.model)(config)
    for parameter in module.parameters():  # The buffers (rotary frequencies and sinusoids) stay float32.
        parameter.data = parameter.data.to(dtype)
    return module


def pass_items(
    module: torch.nn.Module, tower: VisionTower, frames: Sequence[np.ndarray], grids: Sequence[Sequence[int]]
) -> TowerOutput:
    """Returns the tower's output for items; each entry of ``frames`` is uint8 ``[frames, height, width, 3]``."""
    parameter = next(module.parameters())
    alike = [np.stack(list(some)) for _, some in groupby(frames, key=np.shape)]
    pixels = torch.cat([patches_of(some, tower, device=parameter.device) for some in alike]).to(parameter.dtype)
    grid = torch.tensor([list(item_grid) for item_grid in grids], dtype=torch.int64)
    output: Any = module(pixels, grid_thw=grid, **_of_grid(module, grid, device=parameter.device))
    return TowerOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def _of_grid(module: Any, grid: Tensor, *, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors that a vision tower derives from ``grid`` int64 ``[items, 3]``, computed on the host.

    On the device the tower would read sizes from it, and each block the lengths of its attention. ``cu_seqlens`` stays
    on the host, where the blocks need it.
    """
    from transformers import vision_utils

    merge = module.config.spatial_merge_size
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=module.num_grid_per_side,
        mode=module.interpolation_mode,
        align_corners=module.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    return {
        "interp_indices": indices.to(device),
        "interp_weights": weights.to(device),
        "position_ids": vision_utils.get_vision_position_ids(grid, merge).to(device),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
    }


def _own_keys(tower: VisionTower | AudioTower) -> dict[str, Any]:
    return {name: value for name, value in tower.config.items() if name not in ("model_type", "transformers_version")}


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def pass_sounds(module: torch.nn.Module, tower: AudioTower, features: Sequence[np.ndarray]) -> Tensor:
    """Returns the rows of sounds, ``[rows, hidden]`` in order; a sound's features are float32 ``[mel bins, frames]``.

    Each sound passes the tower separately, so its rows do not depend on other sounds. In a batch, matrix products of
    more rows round differently, by up to 3e-7.
    """
    return torch.cat([_rows_of(module, tower, feature) for feature in features])


def _rows_of(module: torch.nn.Module, tower: AudioTower, features: np.ndarray) -> Tensor:
    """Returns the rows of one sound.

    The convolutions process chunks of ``tower.chunk_frames`` frames separately. In the layers after them, all rows of a
    window attend to each other. Transformers pads chunks to the longest chunk of the batch, and the padding changes the
    convolutions' results. This function pads every chunk to the full length, as transformers does in any batch with a
    sound of at least a second.
    """
    device, frames = next(module.parameters()).device, features.shape[1]
    padded = F.pad(torch.tensor(features, device=device), (0, -frames % tower.chunk_frames))
    chunk_rows = tower.rows_of_frames(tower.chunk_frames)
    rows, window = tower.rows_of_frames(frames), tower.config["n_window_infer"] // tower.chunk_frames * chunk_rows
    ends = [0, *range(window, rows, window), rows]
    output: Any = module(
        None,
        feature_lens=None,
        padded_feature=torch.stack(padded.split(tower.chunk_frames, dim=1)),
        chunk_lengths=torch.tensor([tower.chunk_frames] * (padded.shape[1] // tower.chunk_frames)),
        valid_indices=torch.arange(rows, device=device),  # only the last chunk has rows of padding
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),  # on the host, where each layer reads it
    )
    found = output.last_hidden_state
    assert isinstance(found, Tensor)
    return found


class TowerInputs(NamedTuple):
    """Holds the inputs of the towers, in the order of the items.

    ``frames`` has an array uint8 ``[frames, height, width, 3]`` for each image or video, and ``grids`` its size (time,
    height, width) in patches. ``sounds`` has the features, float32 ``[mel bins, frames]``, of each item with sound.
    """

    frames: Sequence[np.ndarray] = ()
    grids: Sequence[Sequence[int]] = ()
    sounds: Sequence[np.ndarray] = ()


def inputs_of(items: Sequence[MediaItem], tensors: Sequence[Mapping[str, np.ndarray]]) -> TowerInputs:
    """Returns the inputs of the towers for items with these tensors."""
    return TowerInputs(
        frames=[item_tensors["frames"] for item_tensors in tensors if "frames" in item_tensors],
        grids=[item.grid for item, item_tensors in zip(items, tensors, strict=True) if "frames" in item_tensors],
        sounds=[item_tensors["features"] for item_tensors in tensors if "features" in item_tensors],
    )


def smallest_image(towers: Towers) -> TowerInputs:
    """Returns the smallest item that the vision tower accepts."""
    tower = towers.vision
    assert tower is not None, "the model sees"
    side = tower.merge_size * tower.patch_size
    frames = np.zeros((tower.temporal_patch_size, side, side, 3), dtype=np.uint8)
    return TowerInputs(frames=[frames], grids=[[1, tower.merge_size, tower.merge_size]])


def smallest_sound(towers: Towers) -> TowerInputs:
    """Returns the smallest item that the audio tower accepts: the features of one row."""
    assert towers.audio is not None, "the model hears"
    return TowerInputs(sounds=[np.zeros((towers.audio.mel_bins, 1), dtype=np.float32)])


def pass_towers(
    inputs: TowerInputs, towers: Towers, *, vision: torch.nn.Module | None, audio: torch.nn.Module | None
) -> Tensor:
    """Returns the outputs of the vision tower, then of the audio tower: ``[1 + deepstack layers, features, hidden]``.

    Entry 0 has the features of the rows. The other entries are added after the first layers of the language model. They
    are 0 for audio. ``vision`` and ``audio`` are the towers' modules; a module is required if it has inputs.
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

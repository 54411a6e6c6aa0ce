"""Makes the patches of a vision tower from uint8 frames, with the numbers that Hugging Face's processor gives."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_core.families.architecture import VisionTower


def patches_of(frames: np.ndarray, tower: VisionTower, *, device: torch.device | str = "cpu") -> Tensor:
    """Returns the patches of an item, float32 ``[patches, colours * frames * patch height * patch width]``.

    ``frames`` is uint8 ``[frames, height, width, 3]``, or ``[items, frames, height, width, 3]`` for items of one shape,
    whose patches stand one item after the other; height and width are multiples of the patch times the merge size. If
    the number of frames is no multiple of the temporal patch size, the last frame is repeated. Patches that become one
    row are neighbours.
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

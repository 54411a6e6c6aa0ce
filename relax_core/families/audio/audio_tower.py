"""Passes sounds through an audio tower, which is Hugging Face's own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.families.architecture import AudioTower


def pass_sounds(module: torch.nn.Module, tower: AudioTower, features: Sequence[np.ndarray]) -> Tensor:
    """Returns the rows of sounds whose features are float32 ``[mel bins, frames]``, ``[rows, hidden]`` in order.

    Each sound passes alone, so that its rows have the same bits in any company: in one batch the products of more rows
    round in another way, by up to 3e-7.
    """
    return torch.cat([_rows_of(module, tower, one) for one in features])


def _rows_of(module: torch.nn.Module, tower: AudioTower, features: np.ndarray) -> Tensor:
    """Returns the rows of one sound.

    The tower computes chunks of ``tower.chunk_frames`` frames apart until its layers, where the rows of the chunks of
    one window attend to each other. Transformers pads chunks to the longest one of its batch, whose length the
    convolutions see. Here every chunk has the full length, as in any batch with a sound of a second or more.
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
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
    )
    found = output.last_hidden_state
    assert isinstance(found, Tensor)
    return found

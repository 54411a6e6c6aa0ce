"""Tests the audio tower: a clip's rows equal transformers' rows, and do not depend on other clips in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_core.families.architecture import AudioTower
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import tiny_omni_config, tiny_omni_files
from relax_core.families.tower_passes import build_tower, pass_sounds
from relax_core.tools.tiny_media import write_settings

FRAMES = (10, 100, 730, 3000)  # frames of clips of 0.1, 1, 7.3 and 30 seconds


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> AudioTower:
    folder = tmp_path_factory.mktemp("model")
    write_settings(folder, tiny_omni_config(), tiny_omni_files())
    audio = folder_architecture(folder).audio
    assert audio is not None
    return audio


@pytest.fixture(scope="module")
def module(tower: AudioTower) -> torch.nn.Module:
    """Makes a tower. Its norms and biases do not have their initial values."""
    torch.manual_seed(0)
    built = build_tower(tower, dtype=torch.float32)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return built


@pytest.fixture(scope="module")
def features(tower: AudioTower) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.standard_normal((tower.mel_bins, frames)).astype(np.float32) for frames in FRAMES]


def test_clips_of_many_lengths_give_the_rows_of_transformers(
    tower: AudioTower, module: Any, features: list[np.ndarray]
) -> None:
    """Transformers pads all chunks to the longest chunk of the batch, which is a complete chunk here."""
    whole = torch.from_numpy(np.concatenate(features, axis=1))
    with torch.no_grad():
        theirs = module(whole, feature_lens=torch.tensor(FRAMES)).last_hidden_state
        ours = pass_sounds(module, tower, features)
    assert len(ours) == sum(tower.rows_of_frames(frames) for frames in FRAMES)
    assert relative(ours, theirs) <= 1e-6


def test_a_clips_rows_are_the_same_alone_and_in_company(
    tower: AudioTower, module: torch.nn.Module, features: list[np.ndarray]
) -> None:
    with torch.no_grad():
        together = pass_sounds(module, tower, features)
        alone = [pass_sounds(module, tower, [feature]) for feature in features]
        backwards = pass_sounds(module, tower, features[::-1])
    assert together.equal(torch.cat(alone))
    assert backwards.equal(torch.cat(alone[::-1]))


def test_a_change_of_one_frame_changes_the_rows_of_its_window_only(
    tower: AudioTower, module: torch.nn.Module, features: list[np.ndarray]
) -> None:
    changed = features[2].copy()
    changed[:, 450] += 1
    with torch.no_grad():
        before, after = (pass_sounds(module, tower, [sound]) for sound in (features[2], changed))
    moved = (before != after).any(1).nonzero()[:, 0]
    assert (int(moved[0]), int(moved[-1])) == (4 * 13, 6 * 13 - 1)  # two chunks of 13 rows form a window


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())

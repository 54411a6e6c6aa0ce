"""Defines audio towers for trainer, engines and encoder: weight shapes, settings, and the rows of a sound.

A video with sound has rows of the video and of the sound (Qwen3-Omni's rules). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.contracts.family import Audio, Family, HfConfig
from relax_core.families.architecture import AudioSettings, AudioTower, PatchSettings
from relax_core.families.hf_config import read_object
from relax_core.families.vision_tower import ItemRows, Shape, linear_shapes, norm_shapes, step_times, timed_offsets


def qwen3_omni_audio_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-Omni's audio tower by their names after the tower's prefix."""
    hidden, wide, channels = config["d_model"], config["encoder_ffn_dim"], config["downsample_hidden_size"]
    bins = config["num_mel_bins"]
    shapes: dict[str, Shape] = {}
    for number in (1, 2, 3):
        shapes[f"conv2d{number}.weight"] = (channels, 1 if number == 1 else channels, 3, 3)
        shapes[f"conv2d{number}.bias"] = (channels,)
        bins = (bins + 1) // 2  # each convolution has a stride of 2
    shapes["conv_out.weight"] = (hidden, channels * bins)
    for index in range(config["encoder_layers"]):
        layer = f"layers.{index}."
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes |= linear_shapes(f"{layer}self_attn.{part}", hidden, hidden)
        shapes |= norm_shapes(f"{layer}self_attn_layer_norm", hidden)
        shapes |= linear_shapes(f"{layer}fc1", hidden, wide)
        shapes |= linear_shapes(f"{layer}fc2", wide, hidden)
        shapes |= norm_shapes(f"{layer}final_layer_norm", hidden)
    shapes |= norm_shapes("ln_post", hidden)
    shapes |= linear_shapes("proj1", hidden, hidden)
    shapes |= linear_shapes("proj2", hidden, config["output_dim"])
    return shapes


EXTRACTOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # transformers 5 writes all processors of a model into this file
_PART = "feature_extractor"


def read_audio_tower(family: Family, hf_config: HfConfig, *, model_folder: Path) -> AudioTower | None:
    """Returns the audio tower of a folder, or None if the model's family has no audio input.

    ``hf_config`` is the part of config.json with ``audio_token_id`` and the tower's config. Raises ValueError for a
    missing file or key and for an unsupported feature extractor.
    """
    if family.audio is None:
        return None
    extractor = _extractor(model_folder)
    try:
        return audio_tower_of(family.audio, hf_config, extractor=extractor)
    except KeyError as error:
        raise ValueError(
            f"model.path={model_folder}: config.json or {EXTRACTOR_FILE} has no {error.args[0]}, which family "
            f"{family.name} needs. Fetch the folder again, with its processor files."
        ) from error


def audio_tower_of(audio: Audio, hf_config: HfConfig, *, extractor: Mapping[str, Any]) -> AudioTower:
    """Returns the audio tower that a config.json and the settings of the feature extractor describe.

    Raises KeyError for a missing key, and ValueError for an unsupported extractor.
    """
    config = hf_config[audio.config_key]
    _check(extractor, mel_bins=config["num_mel_bins"])
    return AudioTower(
        audio=audio,
        config=config,
        sampling_rate=extractor["sampling_rate"],
        mel_bins=extractor["feature_size"],
        fft_size=extractor["n_fft"],
        hop_length=extractor["hop_length"],
        chunk_frames=2 * config["n_window"],
        audio_token_id=hf_config["audio_token_id"],
        audio_start_token_id=hf_config["audio_start_token_id"],
        audio_end_token_id=hf_config["audio_end_token_id"],
        hidden_size=config["d_model"],
        num_layers=config["encoder_layers"],
        num_heads=config["encoder_attention_heads"],
        intermediate_size=config["encoder_ffn_dim"],
    )


def _check(extractor: Mapping[str, Any], *, mel_bins: int) -> None:
    kind = extractor.get("feature_extractor_type", "WhisperFeatureExtractor")
    if kind != "WhisperFeatureExtractor":
        raise ValueError(
            f"{EXTRACTOR_FILE} feature_extractor_type={kind}: only WhisperFeatureExtractor is supported. "
            "Choose another model."
        )
    if extractor.get("dither"):
        raise ValueError(
            f"{EXTRACTOR_FILE} dither={extractor['dither']}: random noise would give each encoding of a sound "
            "different features. Use dither=0.0."
        )
    if extractor["feature_size"] != mel_bins:
        raise ValueError(
            f"{EXTRACTOR_FILE} feature_size={extractor['feature_size']} with num_mel_bins={mel_bins} in config.json: "
            "the two numbers of bins must be equal. Fetch the folder again."
        )


def _extractor(model_folder: Path) -> Mapping[str, Any]:
    """Returns the settings of the feature extractor; they may be in different files."""
    for name in (EXTRACTOR_FILE, PROCESSOR_FILE):
        file = model_folder / name
        if not file.exists():
            continue
        settings = read_object(file)
        settings = settings.get(_PART, settings)
        if "hop_length" in settings:
            return settings
    raise ValueError(
        f"model.path={model_folder}: neither {EXTRACTOR_FILE} nor {PROCESSOR_FILE} there has a feature extractor, "
        "which a model with audio input needs. Fetch the folder again, with its processor files."
    )


def clip_rows(audio: AudioSettings, *, frames: int) -> ItemRows:
    """Returns the rows of a sound with ``frames`` frames of features.

    The rows replace one token. The chat template's tokens that begin and end a sound stay around the rows.
    """
    rows = audio.rows_of_frames(frames)
    offsets = np.repeat(np.arange(rows, dtype=np.int32)[None], 3, axis=0)
    return ItemRows(np.full(rows, audio.audio_token_id, np.int32), offsets, rows, [audio.audio_token_id])


def audible_feature_rows(audio: AudioSettings, token_ids: np.ndarray) -> np.ndarray:
    """Returns which rows of an item get a feature of the audio tower, bool ``[rows]``."""
    found: np.ndarray = token_ids == audio.audio_token_id
    return found


def video_with_sound_rows(
    tower: PatchSettings, audio: AudioSettings, *, grid: Sequence[int], seconds: float, frames: int
) -> ItemRows:
    """Returns the rows of a video with ``grid`` (time, height, width) in patches, together with its sound.

    ``seconds`` is the time between two steps of the grid, and ``frames`` counts the frames of the sound's features. The
    rows are ordered by time; at equal times the video's row is first. The rows left over from the longer medium come
    last and alone determine how far the item advances the positions. The tokens that begin and end a sound surround the
    rows. Rows and tokens together replace one token inside the pair of vision tokens.
    """
    seen = timed_offsets(tower, grid=grid, seconds=seconds)
    heard = np.repeat(np.arange(audio.rows_of_frames(frames), dtype=np.float32)[None], 3, axis=0)
    times = np.concatenate([step_times(tower, grid=grid, seconds=seconds), heard[0].astype(np.float64)])
    order = np.argsort(times, kind="stable")  # merges two ordered lists; at equal times the video's row is first
    is_heard = order >= seen.shape[1]
    offsets = 1 + np.concatenate([seen, heard], axis=1)[:, order]  # 1 for the token that begins the sound
    left = np.flatnonzero(is_heard != is_heard[-1])[-1] + 1  # the row after the last row of the shorter medium
    end = offsets[:, left:].max() + 1
    ids = np.where(is_heard, audio.audio_token_id, tower.video_token_id)
    return ItemRows(
        np.array([audio.audio_start_token_id, *ids, audio.audio_end_token_id], np.int32),
        np.concatenate([np.zeros((3, 1), np.float32), offsets, np.full((3, 1), end, np.float32)], axis=1),
        float(end) + 1,
        [tower.video_token_id],
    )

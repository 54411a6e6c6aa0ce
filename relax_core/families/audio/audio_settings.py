"""Reads a model's audio tower and the settings of its feature extractor from a Hugging Face folder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.contracts.family import Audio, Family, HfConfig
from relax_core.families.architecture import AudioTower
from relax_core.families.hf_config import read_object

EXTRACTOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # transformers 5 writes all processors of a model into this one
_PART = "feature_extractor"


def read_audio_tower(family: Family, hf_config: HfConfig, *, model_folder: Path) -> AudioTower | None:
    """Returns the audio tower of a folder, None if its family does not hear.

    ``hf_config`` is the part of config.json that has ``audio_token_id`` and the tower's own part. Raises ValueError for
    a missing file or key, and for a feature extractor that is not computed.
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
    """Returns the audio tower that a config.json and the settings of its feature extractor describe.

    Raises KeyError for a missing key, and ValueError for an extractor that is not computed.
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
            f"{EXTRACTOR_FILE} feature_extractor_type={kind}: only WhisperFeatureExtractor is computed. "
            "Choose another model."
        )
    if extractor.get("dither"):
        raise ValueError(
            f"{EXTRACTOR_FILE} dither={extractor['dither']}: random noise would give each encoding of a sound other "
            "features. Use dither=0.0."
        )
    if extractor["feature_size"] != mel_bins:
        raise ValueError(
            f"{EXTRACTOR_FILE} feature_size={extractor['feature_size']} with num_mel_bins={mel_bins} in config.json: "
            "the tower takes as many bins as the extractor gives. Fetch the folder again."
        )


def _extractor(model_folder: Path) -> Mapping[str, Any]:
    """Returns the settings of the feature extractor from the file that has them."""
    for name in (EXTRACTOR_FILE, PROCESSOR_FILE):
        file = model_folder / name
        if not file.exists():
            continue
        try:
            settings: Mapping[str, Any] = read_object(file)
        except ValueError as error:
            raise ValueError(f"{file} is not JSON: {error}. Fetch it again.") from error
        settings = settings.get(_PART, settings)
        if "hop_length" in settings:
            return settings
    raise ValueError(
        f"model.path={model_folder}: neither {EXTRACTOR_FILE} nor {PROCESSOR_FILE} there has a feature extractor, "
        "which a model that hears needs. Fetch the folder again, with its processor files."
    )

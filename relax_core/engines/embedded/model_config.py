"""Reads the architecture of a Hugging Face folder, and the tokens that end a response."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import end_token_ids

FEATURE_MIB = 256  # maximum size of the tower features that the engine caches


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """Holds a model's architecture. ``eos_token_ids`` end a response, except in requests with ignore_eos."""

    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path, *, family: str | None = None) -> ModelConfig:
    """Reads a folder's config.json.

    ``family`` is the name or file of an additional model family. Raises ValueError if config.json is missing, names an
    unknown family, or has an unsupported option.
    """
    return ModelConfig(**vars(folder_architecture(folder, also=family)), eos_token_ids=end_token_ids(folder))

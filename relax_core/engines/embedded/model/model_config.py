"""Reads the architecture of a Hugging Face folder, and which tokens end a response."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import end_token_ids


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """Holds a model's architecture; ``eos_token_ids`` end a response unless the request has ignore_eos."""

    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path, *, family: str | None = None) -> ModelConfig:
    """Reads a folder; ``family``, a name or a file, is one that it may be of beside those that have a name. Raises
    ValueError where it has no config.json, an unknown family, or an option that is not computed.
    """
    return ModelConfig(**vars(folder_architecture(folder, also=family)), eos_token_ids=end_token_ids(folder))

"""Reads the architecture of a Hugging Face folder, and which tokens end a response."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.families.architecture import Architecture
from relax_core.families.folder import folder_architecture, read_hf_config


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """Holds a model's architecture; ``eos_token_ids`` end a response unless the request has ignore_eos."""

    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path) -> ModelConfig:
    """Reads a folder's config.json.

    Raises ValueError if there is no config.json, its family is unknown, or it has an option that is not supported.
    """
    return ModelConfig(
        **vars(folder_architecture(folder)), eos_token_ids=_eos_token_ids(folder, read_hf_config(folder))
    )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ids of config.json and of generation_config.json together, as SGLang does."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    for source in (raw, json.loads(generation.read_text()) if generation.is_file() else {}):
        ids = source.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))

"""Reads what SGLang's processes need to know of the served model's folder."""

from __future__ import annotations

from pathlib import Path

from relax_core.families.architecture import VisionTower
from relax_core.families.folder import family_key
from relax_core.families.hf_config import has_hf_config, read_hf_config
from relax_core.families.vision.tower_settings import read_tower
from relax_core.registry import find_family


def vision_tower(model_folder: Path) -> VisionTower | None:
    """Returns the vision tower of the folder's model, None if it reads text only or is of no family of Relax."""
    if not has_hf_config(model_folder):
        return None
    config = read_hf_config(model_folder)
    key = family_key(config.get("model_type"))
    return None if key is None else read_tower(find_family(key), config, model_folder=model_folder)

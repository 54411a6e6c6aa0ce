"""The families that the Megatron back end can train."""

from __future__ import annotations

from pathlib import Path

from relax_core.train.models.family import Family, HfConfig, read_hf_config
from relax_core.train.models.qwen3 import QWEN3
from relax_core.train.models.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN3, QWEN3_MOE)}


def find_family(name: str) -> Family:
    """The family of that name; ValueError naming what exists."""
    if name not in FAMILIES:
        raise ValueError(f"model.family={name}: no such model family. What exists: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]


def check_model_type(family: Family, hf_config: HfConfig, *, model_folder: Path) -> None:
    """Raises ValueError when config.json's model_type is not the family's."""
    model_type = hf_config.get("model_type")
    if model_type != family.hf_model_type:
        known = ", ".join(f"{each.hf_model_type} (family {each.name})" for each in FAMILIES.values())
        raise ValueError(
            f"model.path={model_folder}: its model_type is {model_type!r}, and model.family={family.name} trains "
            f"{family.hf_model_type!r}. What exists: {known}."
        )


def read_model(model_folder: Path, family_name: str) -> tuple[Family, HfConfig]:
    """Family and config.json of a model folder, checked to belong together and to be trainable."""
    family = find_family(family_name)
    hf_config = read_hf_config(model_folder)
    check_model_type(family, hf_config, model_folder=model_folder)
    family.transformer_arguments(hf_config)
    return family, hf_config

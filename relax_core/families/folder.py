"""Finds the family, the architecture and the weight files of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from relax_core.contracts.family import Family, HfConfig
from relax_core.families.architecture import Architecture, VisionTower
from relax_core.families.hf_config import has_hf_config, read_hf_config
from relax_core.families.table import read_architecture
from relax_core.families.vision.tower_settings import read_tower
from relax_core.registry import find_family, names

WEIGHT_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """The index of a model's weight files. ``weight_map`` maps each tensor to its file."""

    weight_map: dict[str, str]


def family_key(name: object, *, also: str | None = None) -> str | None:
    """Returns the name or file with which `find_family` finds the family of model_type ``name``, or None.

    ``also`` is model.family of a run, which may be a file; it is preferred if its family has that name. Raises
    ValueError if ``also`` cannot be loaded.
    """
    if also is not None and find_family(also).name == name:
        return also
    return name if isinstance(name, str) and name in names("family") else None


def family_of(hf_config: HfConfig, *, model_folder: Path, also: str | None = None) -> Family:
    """Returns the family of a folder's model_type.

    ``also`` is tried before the families that have a name. Raises a ValueError that lists the names if none fits.
    """
    model_type = hf_config.get("model_type")
    key = family_key(model_type, also=also)
    if key is None:
        raise ValueError(
            f"model.path={model_folder}: its model_type is {model_type!r}, which is no family of Relax. What exists: "
            f"{', '.join(names('family'))}. For one of your own: model.family=/path/my_family.py"
        )
    return find_family(key)


def folder_architecture(model_folder: Path, *, family: str | None = None, also: str | None = None) -> Architecture:
    """Returns the architecture that a folder's config.json describes.

    ``family`` is a name or a file. If it is None, the folder may be of any family, including ``also`` (a name or a
    file). Raises ValueError if the folder is of another family than ``family``, or if Relax cannot compute its model.
    """
    hf_config = read_hf_config(model_folder)
    if family is None:
        return _architecture(family_of(hf_config, model_folder=model_folder, also=also), hf_config, model_folder)
    wanted = find_family(family)
    if hf_config.get("model_type") != wanted.name:
        found = family_of(hf_config, model_folder=model_folder)
        raise ValueError(
            f"model.path={model_folder}: its model_type is {found.name!r}, and model.family={wanted.name}. "
            f"Use model={found.name}."
        )
    return _architecture(wanted, hf_config, model_folder)


def _architecture(family: Family, hf_config: HfConfig, model_folder: Path) -> Architecture:
    tower = read_tower(family, hf_config, model_folder=model_folder)
    return replace(read_architecture(family, hf_config), vision=tower)


def vision_tower(model_folder: Path) -> VisionTower | None:
    """Returns the vision tower of a folder's model, None if it reads text only or is of no family of Relax."""
    if not has_hf_config(model_folder):
        return None
    hf_config = read_hf_config(model_folder)
    key = family_key(hf_config.get("model_type"))
    return None if key is None else read_tower(find_family(key), hf_config, model_folder=model_folder)


def weight_files(model_folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder's weights in order; the list may be empty.

    If there is an index, it decides, because some folders hold the weights a second time under other names
    (consolidated.safetensors). Raises ValueError for an index that cannot be read.
    """
    index = model_folder / WEIGHT_INDEX
    if index.is_file():
        try:
            names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        except msgspec.DecodeError as error:
            raise ValueError(f"{index} cannot be read: {error}. Fetch it again.") from error
        return sorted(model_folder / name for name in set(names))
    whole = model_folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(model_folder.glob("*.safetensors"))

"""Finds the family, the architecture and the weight files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from relax_core.families.architecture import Architecture
from relax_core.families.table import FAMILIES, Family, HfConfig, read_architecture

WEIGHT_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """The index of a model's weight files. ``weight_map`` maps each tensor to its file."""

    weight_map: dict[str, str]


def find_family(name: str) -> Family:
    """Returns the family of that name. Raises a ValueError that lists the names if there is none."""
    if name not in FAMILIES:
        raise ValueError(f"model.family={name}: no such model family. What exists: {_known()}.")
    return FAMILIES[name]


def read_hf_config(model_folder: Path) -> dict[str, Any]:
    """Returns the content of a Hugging Face folder's config.json. Raises ValueError if there is none."""
    path = model_folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={model_folder}: no config.json there. Give a Hugging Face model folder.")
    config = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def family_of(hf_config: HfConfig, *, model_folder: Path) -> Family:
    """Returns the family of a folder's model_type. Raises a ValueError that lists the names if none has it."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model.path={model_folder}: its model_type is {model_type!r}, which is no family of Relax. What exists: "
            f"{_known()}."
        )
    return FAMILIES[model_type]


def folder_architecture(model_folder: Path, *, family: str | None = None) -> Architecture:
    """Returns the architecture that a folder's config.json describes.

    If ``family`` is None, the folder may be of any family. Raises ValueError if it is of another family than
    ``family``, or if Relax cannot compute its model.
    """
    hf_config = read_hf_config(model_folder)
    wanted = None if family is None else find_family(family)
    found = family_of(hf_config, model_folder=model_folder)
    if wanted is not None and found.name != wanted.name:
        raise ValueError(
            f"model.path={model_folder}: its model_type is {found.name!r}, and model.family={wanted.name}. "
            f"Use model={found.name}."
        )
    return read_architecture(found, hf_config)


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


def _known() -> str:
    return ", ".join(sorted(FAMILIES))

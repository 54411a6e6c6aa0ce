"""Finds the family, the architecture and the weight files of a Hugging Face folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from relax_core.contracts.family import ExpertLayout, Family, HfConfig
from relax_core.contracts.untrusted_files import check_regular, open_regular, read_regular
from relax_core.contracts.untrusted_values import decode_json, shown
from relax_core.families.architecture import Architecture, AudioTower, VisionTower
from relax_core.families.audio_tower import read_audio_tower
from relax_core.families.builtin_families import read_architecture
from relax_core.families.hf_config import has_hf_config, inner_config, read_hf_config
from relax_core.families.vision_tower import read_tower
from relax_core.registry import find_family, names

WEIGHT_INDEX, WHOLE_WEIGHTS = "model.safetensors.index.json", "model.safetensors"
ADAPTER_FILE = "adapter_config.json"  # a folder with this file has the weights of a LoRA adapter
# Error texts for unsupported model_types that resemble a supported model_type.
_REFUSED = {
    "qwen2_5_omni": "Qwen2.5-Omni has other towers and other positions, which Relax does not compute. Use a folder of "
    "Qwen3-Omni, with model=qwen3_omni.",
    "qwen3_omni_moe_thinker": "the folder has only the thinker. Use the published folder, with model_type "
    "qwen3_omni_moe, because exports also contain talker and code2wav.",
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors


class _Stored(msgspec.Struct):
    """Holds the entry of a tensor in a file's header; the metadata entry has no dtype."""

    dtype: str = ""


class _Index(msgspec.Struct):
    """Holds the index of a model's weight files. ``weight_map`` maps each tensor to its file."""

    weight_map: dict[str, str]


def family_key(name: object, *, also: str | None = None) -> str | None:
    """Returns the argument of `find_family` for the family of model_type ``name``, or None if there is no such family.

    ``also`` is a run's model.family, which may be a file. It is returned if its family has the name ``name``. Raises
    ValueError if ``also`` cannot be loaded.
    """
    if also is not None and find_family(also).name == name:
        return also
    return name if isinstance(name, str) and name in names("family") else None


def family_of(hf_config: HfConfig, *, model_folder: Path, also: str | None = None) -> Family:
    """Returns the family of a folder's model_type.

    ``also`` is tried before the registered families. If no family matches, raises ValueError with the registered names.
    """
    model_type = hf_config.get("model_type")
    key = family_key(model_type, also=also)
    if key is None and isinstance(model_type, str) and model_type in _REFUSED:
        raise ValueError(f"model.path={model_folder}: its model_type is {model_type!r}: {_REFUSED[model_type]}")
    if key is None:
        raise ValueError(
            f"model.path={model_folder}: its model_type is {shown(model_type)}, which is not a family of Relax. What "
            f"exists: {', '.join(names('family'))}. For one of your own: model.family=/path/my_family.py"
        )
    return find_family(key)


def folder_architecture(model_folder: Path, *, family: str | None = None, also: str | None = None) -> Architecture:
    """Returns the architecture that a folder's config.json describes.

    ``family`` is a name or a file. If it is None, the folder may be of any family, including ``also`` (a name or a
    file). Raises ValueError if the folder's family is not ``family``, or if Relax cannot compute the model.
    """
    hf_config = read_hf_config(model_folder)
    if family is None:
        return _architecture(family_of(hf_config, model_folder=model_folder, also=also), hf_config, model_folder)
    wanted = find_family(family)
    if hf_config.get("model_type") != wanted.name:
        found = family_of(hf_config, model_folder=model_folder)
        raise ValueError(
            f"model.path={model_folder}: its model_type is {found.name!r}, and model.family={wanted.name}. "
            f"Use model={found.model_option}."
        )
    return _architecture(wanted, hf_config, model_folder)


def _architecture(family: Family, hf_config: HfConfig, model_folder: Path) -> Architecture:
    architecture = replace(
        read_architecture(family, hf_config),
        vision=read_tower(family, inner_config(hf_config), model_folder=model_folder),
        audio=read_audio_tower(family, inner_config(hf_config), model_folder=model_folder),
    )
    if architecture.float32 or len(family.expert_layouts) > 1:
        stored = stored_kinds(model_folder)
        architecture = replace(
            architecture,
            float32=_stored_float32(architecture.float32, stored),
            expert_layout=_expert_layout(family, stored),
        )
    return architecture


def _expert_layout(family: Family, stored: Mapping[str, str]) -> ExpertLayout:
    """Returns the layout of the stored experts, or the published layout if the folder stores no experts."""
    language = [name for name in stored if name.startswith(family.prefix) and ".experts." in name]
    if len(family.expert_layouts) == 1 or not language:
        return family.expert_layouts[0]
    apart = re.search(r"\.experts\.\d+\.", language[0]) is not None
    return next(layout for layout in family.expert_layouts if (layout is ExpertLayout.apart) is apart)


def _stored_float32(endings: tuple[str, ...], stored: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the endings of ``float32`` names that the folder stores in float32.

    For a folder without weights these are all endings.
    """
    return tuple(
        ending for ending in endings if all(kind == "F32" for name, kind in stored.items() if name.endswith(ending))
    )


def vision_tower(model_folder: Path) -> VisionTower | None:
    """Returns the vision tower of a folder's model, or None for a text-only model or an unknown family."""
    if not has_hf_config(model_folder):
        return None
    hf_config = read_hf_config(model_folder)
    key = family_key(hf_config.get("model_type"))
    return None if key is None else read_tower(find_family(key), inner_config(hf_config), model_folder=model_folder)


def audio_tower(model_folder: Path) -> AudioTower | None:
    """Returns the audio tower of a folder's model, or None without audio input or for an unknown family."""
    if not has_hf_config(model_folder):
        return None
    hf_config = read_hf_config(model_folder)
    key = family_key(hf_config.get("model_type"))
    return (
        None if key is None else read_audio_tower(find_family(key), inner_config(hf_config), model_folder=model_folder)
    )


def stored_kinds(model_folder: Path) -> dict[str, str]:
    """Returns the dtype of each stored tensor in safetensors' notation; reads only the files' headers.

    Raises ValueError for a file that cannot be read.
    """
    found: dict[str, str] = {}
    for path in weight_files(model_folder):
        try:
            header = decode_json(read_header(path), dict[str, _Stored])
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error
        found |= {name: tensor.dtype for name, tensor in header.items() if name != "__metadata__"}
    return found


def weight_files(model_folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder's weights, in order; the list may be empty.

    If there is an index, only its files are returned, because some folders have a second copy of the weights under
    another name (consolidated.safetensors). Raises ValueError for an index that cannot be read and for a path that
    exists but is not a plain file.
    """
    index = model_folder / WEIGHT_INDEX
    if index.exists():
        try:
            content = read_regular(index, max_bytes=_MAX_HEADER_BYTES)
            names = decode_json(content, _Index).weight_map.values()
        except ValueError as error:
            raise ValueError(f"{index} cannot be read: {error}. Fetch it again.") from error
        found = sorted(model_folder / name for name in set(names))
    else:
        whole = model_folder / WHOLE_WEIGHTS
        found = [whole] if whole.exists() else sorted(model_folder.glob("*.safetensors"))
    for path in found:
        if path.exists():  # the reader reports a missing file
            check_regular(path)
    return found


def read_header(path: Path) -> bytes:
    """Returns the JSON header of a safetensors file.

    Raises ValueError if the path is not a plain file, or if the header is larger than the file or `_MAX_HEADER_BYTES`.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES or length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"its header has {length} bytes")
        return file.read(length)

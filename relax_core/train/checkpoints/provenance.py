"""Records the origin of a trainer's checkpoint in provenance.json next to its tensors: model, layout and libraries.

This module has no heavy imports.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.schema import ParallelConfig
from relax_core.families.architecture import Architecture
from relax_core.train.hf.weight_rules import megatron_arguments
from relax_core.weights.lora_merge import Lora

PROVENANCE = "provenance.json"
_SIZES = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
# keys of a tower that are not numbers of the model
_UNREAD = ("model_type", "dtype", "torch_dtype", "transformers_version")
_LIBRARIES = ("relax-core", "torch", "megatron-core")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the model and the run that wrote a checkpoint; any layout of the same model can read it.

    ``model`` holds the numbers that determine the shapes of the tensors. ``head`` is "policy" for a model with an
    output layer, or "critic" for a model with a value head. ``layout`` holds the sizes by their keys in `parallel`.
    ``step`` counts train steps and ``updates`` the updates of the optimizer. ``frozen`` names the parts of the model
    that have no optimizer state. ``lora`` has the settings of the adapters; the checkpoint then has only their factors.
    """

    family: str
    head: str
    dtype: str
    model: dict[str, Any]
    layout: dict[str, int]
    world_size: int
    step: int
    updates: int
    time: str
    libraries: dict[str, str]
    frozen: tuple[str, ...] = ()
    lora: Lora | None = None


def layout_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Returns the sizes of a layout by their keys."""
    return {size: getattr(parallel, size) for size in _SIZES}


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that determine a checkpoint's format."""
    return {library: importlib.metadata.version(library) for library in _LIBRARIES}


def model_numbers(architecture: Architecture) -> dict[str, Any]:
    """Returns a model's numbers that must be equal to the numbers of the model in a checkpoint.

    The key for rotary scaling is left out for a plain rotary embedding, because older checkpoints do not have this key.
    """
    numbers = {
        **megatron_arguments(architecture),
        "vocab_size": architecture.vocab_size,
        "rotary_base": architecture.rope.theta,
        "tied_embeddings": architecture.tie_word_embeddings,
    }
    if architecture.rope.scaling is not None:
        numbers["rotary_scaling"] = dataclasses.asdict(architecture.rope.scaling)
    if architecture.rope.sections is not None:
        numbers["rotary_sections"] = list(architecture.rope.sections)
    if architecture.rope.part != 1.0:
        numbers["rotary_part"] = architecture.rope.part
    if architecture.delta_net is not None:
        numbers["delta_net"] = dataclasses.asdict(architecture.delta_net)
        numbers["delta_layers"] = list(architecture.delta_layers)
    if architecture.vision is not None:
        numbers["vision"] = _read_values(architecture.vision.config)
    if architecture.audio is not None:
        numbers["audio"] = _read_values(architecture.audio.config)
    return numbers


def _read_values(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _UNREAD}


def write_provenance(provenance: Provenance, folder: Path) -> None:
    """Writes provenance.json into ``folder``."""
    (folder / PROVENANCE).write_bytes(msgspec.json.format(msgspec.json.encode(provenance), indent=1))


def read_provenance(folder: Path) -> Provenance:
    """Reads provenance.json; raises ValueError if the folder is not a checkpoint of the trainer."""
    path = folder / PROVENANCE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Provenance)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"checkpoint {folder} cannot be read: {path}: {error}. It is corrupt, or of an older version of Relax. "
            "Resume from another checkpoint with resume=<its folder>."
        ) from error


def check_same_model(saved: Provenance, now: Provenance, *, folder: Path) -> None:
    """Raises ValueError with the differences if the tensors of ``saved`` do not fit the model ``now``."""

    def numbers(provenance: Provenance) -> dict[str, Any]:
        return {"family": provenance.family, "head": provenance.head, "dtype": provenance.dtype, **provenance.model}

    check_same_numbers(numbers(saved), numbers(now), folder=folder)


def check_same_frozen_parts(saved: Provenance, now: Provenance, *, folder: Path) -> None:
    """Raises ValueError if different parts of the model were frozen, because frozen parts have no optimizer state."""
    before, here = (f"[{','.join(source.frozen)}]" for source in (saved, now))
    if set(saved.frozen) != set(now.frozen):
        raise ValueError(
            f"checkpoint {folder}: the parts {before} of the model were frozen and have no optimizer state. Now "
            f"{here} are frozen. Continue with model.freeze={before} and the same modality, or start a new run with "
            "resume=null from its weights: relax export FOLDER OUTPUT, then model.path=OUTPUT."
        )


def check_same_adapters(saved: Provenance, now: Provenance, *, folder: Path) -> None:
    """Raises ValueError if the adapters of ``saved`` have other settings: their factors have another meaning."""
    if saved.lora == now.lora:
        return
    there, here = ({} if source.lora is None else dataclasses.asdict(source.lora) for source in (saved, now))
    differing = ", ".join(
        f"{key} {there.get(key, 'none')} there, {here.get(key, 'none')} here"
        for key in (there or here)
        if there.get(key) != here.get(key)
    )
    raise ValueError(
        f"checkpoint {folder}: model.lora differs: {differing}. Continue with the settings of the checkpoint, "
        "or start a new run with resume=null."
    )


def check_same_numbers(saved: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path) -> None:
    """Raises ValueError with the differences if two results of `model_numbers` differ."""
    differing = [
        f"{name}={saved.get(name)} there, {now.get(name)} here"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise ValueError(
            f"checkpoint {folder} is of another model: {'; '.join(differing)}. Continue with the model of the "
            "checkpoint (model.path, model.dtype), or start a new run with resume=null."
        )

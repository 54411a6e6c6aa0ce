"""What made a checkpoint of the trainer: provenance.json beside its tensors. No heavy imports."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.schema import ParallelConfig
from relax_core.families.architecture import Architecture
from relax_core.train.model.transformer_config import megatron_arguments

PROVENANCE = "provenance.json"
_SIZES = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
_LIBRARIES = ("relax-core", "torch", "megatron-core")


class MadeBy(msgspec.Struct, frozen=True, kw_only=True):
    """``model``: the numbers that shape its tensors. ``head``: "policy", or "critic" with a value head in the place of
    the output layer. ``layout``: sizes by their keys in `parallel`. ``step``: train steps done; ``updates``: those of
    the optimizer. Any layout reads it; another model does not."""

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


def layout_sizes(parallel: ParallelConfig) -> dict[str, int]:
    return {size: getattr(parallel, size) for size in _SIZES}


def library_versions() -> dict[str, str]:
    return {library: importlib.metadata.version(library) for library in _LIBRARIES}


def model_numbers(architecture: Architecture) -> dict[str, Any]:
    """What must agree between a model and the one that wrote a checkpoint. A plain rotary embedding has no scaling in
    it, so that checkpoints which are older than the key can be read."""
    numbers = {
        **megatron_arguments(architecture),
        "vocab_size": architecture.vocab_size,
        "rotary_base": architecture.rope.theta,
        "tied_embeddings": architecture.tie_word_embeddings,
    }
    if architecture.rope.scaling is not None:
        numbers["rotary_scaling"] = dataclasses.asdict(architecture.rope.scaling)
    return numbers


def write_provenance(provenance: MadeBy, folder: Path) -> None:
    (folder / PROVENANCE).write_bytes(msgspec.json.format(msgspec.json.encode(provenance), indent=1))


def read_provenance(folder: Path) -> MadeBy:
    """Raises ValueError where the folder is no checkpoint of the trainer."""
    path = folder / PROVENANCE
    try:
        return msgspec.json.decode(path.read_bytes(), type=MadeBy)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"checkpoint {folder} cannot be read: {path}: {error}. It is corrupt, or of an older version of Relax. "
            "Go on from another one with resume=<its folder>."
        ) from error


def check_same_model(saved: MadeBy, now: MadeBy, *, folder: Path) -> None:
    """Raises ValueError, naming what differs, where the tensors of ``saved`` are not those of the model ``now``."""

    def numbers(provenance: MadeBy) -> dict[str, Any]:
        return {"family": provenance.family, "head": provenance.head, "dtype": provenance.dtype, **provenance.model}

    check_same_numbers(numbers(saved), numbers(now), folder=folder)


def check_same_numbers(saved: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path) -> None:
    """The same for `model_numbers`."""
    differing = [
        f"{name}={saved.get(name)} there, {now.get(name)} here"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise ValueError(
            f"checkpoint {folder} is of another model: {'; '.join(differing)}. Go on with the model that it was made "
            "with (model.path, model.dtype), or start a new run with resume=null."
        )

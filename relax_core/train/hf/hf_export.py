"""Writes trained weights as a Hugging Face folder that `transformers` and every engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from relax_core.contracts.engine import TensorSpec
from relax_core.families.hf_config import CONFIG_FILE, has_hf_config, read_hf_config
from relax_core.train.checkpoints.atomic_folder import atomic_folder
from relax_core.weights.safetensors_stream import library_layout, write_safetensors

Weight = tuple[str, str, Sequence[int]]  # name, dtype, shape
SHARD_BYTES = 4_000_000_000
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # configuration, tokenizer and chat template
INDEX = "model.safetensors.index.json"
TIED_OUTPUT = "lm_head.weight"


def export_hf_folder(
    tensors: Iterator[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, Sequence[int]],
    dtype: str,
    source_folder: Path,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``target`` with the weights as safetensors and all other files as in ``source_folder``.

    ``tensors`` are (Hugging Face name, tensor) in the order of ``shapes``, all with the same ``dtype``; one tensor is
    in memory at a time. A file holds at most ``shard_bytes`` bytes, or one tensor. If config.json ties the embeddings,
    the output weight is left out as transformers does. The new config.json has the dtype of the weights. The folder
    appears complete or not at all and replaces an older one. OSError names what was not written, where, and how many
    bytes are free. Raises ValueError if the source has no config.json.
    """
    if not has_hf_config(source_folder):
        raise ValueError(f"model.path={source_folder}: no config.json there. Give a Hugging Face model folder.")
    with atomic_folder(target) as folder:
        for path in sorted(source_folder.iterdir()):
            if path.suffix in COPIED_SUFFIXES and path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        config = read_hf_config(folder)
        left_out = {TIED_OUTPUT} if config.get("tie_word_embeddings") else set()
        weights = [(name, dtype, shape) for name, shape in shapes.items() if name not in left_out]
        _write_shards(folder, _cut(weights, shard_bytes), _without(left_out, tensors))
        config = _with_dtype(config, dtype)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Sets the weights' dtype under the key that this config uses, which is ``torch_dtype`` in older ones."""
    return config | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}


def _without(left_out: Container[str], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name not in left_out:
            yield name, tensor
        del tensor  # This frees the tensor before the next one is made.


def _cut(weights: Iterable[Weight], shard_bytes: int) -> list[list[TensorSpec]]:
    """Splits the weights in order into files of at most ``shard_bytes``; each file is in the library's order."""
    shards: list[list[Weight]] = []
    free = 0
    for weight in weights:
        size = library_layout([weight])[0].nbytes
        if size > free:
            shards.append([])
            free = shard_bytes
        shards[-1].append(weight)
        free -= size
    return [library_layout(shard) for shard in shards]


def _write_shards(folder: Path, shards: Sequence[Sequence[TensorSpec]], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes the files, and their index if there are several."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else "model.safetensors"
        write_safetensors(folder / name, shard, islice(tensors, len(shard)))
        weight_map |= {spec.name: name for spec in shard}
    extra = next(tensors, None)  # The end must be read, because the ranks of an export wait for it.
    assert extra is None, f"{extra}: its shape was not given"
    if shards[1:]:
        total = sum(spec.nbytes for shard in shards for spec in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

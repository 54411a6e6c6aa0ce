"""Writes trained weights as a Hugging Face folder that `transformers` and all engines can load.

The weights come from a trainer's ranks, or from a checkpoint of any layout. One process without Megatron can read the
checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_core.contracts.engine import TensorSpec
from relax_core.families.folder import ADAPTER_FILE, WEIGHT_INDEX, family_key, folder_architecture, weight_files
from relax_core.families.hf_config import CONFIG_FILE, has_hf_config, read_hf_config
from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, StoredFolder, read_errors_as_valueerror
from relax_core.train.checkpoints.checkpoint_store import atomic_folder
from relax_core.train.checkpoints.provenance import check_same_numbers, model_numbers, read_provenance
from relax_core.train.hf.stored_weights import fused, stored_weights
from relax_core.weights.folder_stream import open_safetensors
from relax_core.weights.safetensors_stream import (
    DTYPES,
    StoredBytes,
    library_layout,
    stored_bytes,
    write_safetensors,
    write_weight_index,
)

Weight = tuple[str, str, Sequence[int]]  # name, dtype, shape
SHARD_BYTES = 4_000_000_000
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # configuration, tokenizer and chat template
FLOATS = {DTYPES[name]: name for name in ("float64", "float32", "bfloat16", "float16")}
TEMPLATE_FOLDER = "additional_chat_templates"  # where transformers stores all chat templates but the default
TIED_OUTPUT = "lm_head.weight"


def export_hf_folder(
    tensors: Iterator[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, Sequence[int]],
    own_dtype: str,
    dtype: str | None = None,
    source_folder: Path,
    target: Path,
    shard_bytes: int = SHARD_BYTES,
    copied_prefixes: tuple[str, ...] = (),
    replace: bool = True,
) -> None:
    """Writes a Hugging Face folder ``target``: the weights as safetensors, and other files of ``source_folder``.

    The other files are the configuration, the tokenizer and the chat templates.

    ``tensors`` are (Hugging Face name, tensor) in the order of ``shapes``; one tensor is in memory at a time. A tensor
    is written in ``dtype``. If ``dtype`` is None, it is written in the tensor's floating-point dtype in
    ``source_folder``, or in ``own_dtype`` if there is no such dtype. The tensors of ``source_folder`` with
    a name that begins with one of ``copied_prefixes`` follow. They are copied in pieces and unchanged. A file holds at
    most ``shard_bytes`` bytes, or one tensor. If config.json ties the embeddings, the output weight is left out, as in
    transformers. The new config.json names ``dtype``. The write is atomic. With ``replace`` an older folder is
    replaced. Otherwise ``target`` must be missing or empty. If the disk fails, raises OSError with the target, the
    reason and the free bytes. Raises ValueError if the source has no config.json.
    """
    if not has_hf_config(source_folder):
        raise ValueError(f"model.path={source_folder}: no config.json there. Give a Hugging Face model folder.")
    with atomic_folder(target, replace=replace) as folder:
        for path in sorted([*source_folder.iterdir(), *source_folder.glob(f"{TEMPLATE_FOLDER}/*.jinja")]):
            left_out = path.name.endswith(".index.json") or path.name == ADAPTER_FILE
            if path.suffix in COPIED_SUFFIXES and path.is_file() and not left_out:
                copy = folder / path.relative_to(source_folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        config = read_hf_config(folder)
        tied = {TIED_OUTPUT} if config.get("tie_word_embeddings") else set()
        stored = {} if dtype else stored_dtypes(source_folder)
        weights = [
            (name, dtype or stored.get(name, own_dtype), shape) for name, shape in shapes.items() if name not in tied
        ]
        dtypes = {name: getattr(torch, dtype_name) for name, dtype_name, _ in weights}
        copied = _copied_weights(source_folder, copied_prefixes)
        weights += [(name, tensor.dtype, tensor.shape) for name, tensor in copied]
        _write_shards(folder, _cut(weights, shard_bytes), chain(_with_dtypes(dtypes, tensors), copied))
        if dtype or not stored:
            config = _with_dtype(config, dtype or own_dtype)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Sets the weights' dtype under the config's key for it: ``torch_dtype`` in older configs."""
    return config | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Returns the dtype of each floating-point weight in a folder by name; empty for a folder without weights."""
    if not weight_files(folder):
        return {}
    return {name: FLOATS[tensor.dtype] for name, tensor in open_safetensors(folder) if tensor.dtype in FLOATS}


def _copied_weights(folder: Path, copied_prefixes: tuple[str, ...]) -> list[tuple[str, StoredBytes]]:
    """Returns the tensors that an export copies, in stored order, without reading them."""
    if not copied_prefixes:
        return []
    return [
        stored
        for file in weight_files(folder)
        for stored in stored_bytes(file)
        if stored[0].startswith(copied_prefixes)
    ]


def _with_dtypes(
    dtypes: Mapping[str, torch.dtype], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Converts each tensor with an entry in ``dtypes`` to that dtype, and yields it."""
    for name, tensor in tensors:
        if name in dtypes:
            yield name, tensor.to(dtypes[name])
        del tensor  # This frees the tensor before the next tensor is made.


def _cut(weights: Iterable[Weight], shard_bytes: int) -> list[list[TensorSpec]]:
    """Splits the weights in order into files of at most ``shard_bytes``.

    Inside a file the weights have the order of the safetensors library.
    """
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


def _write_shards(
    folder: Path, shards: Sequence[Sequence[TensorSpec]], tensors: Iterator[tuple[str, Tensor | StoredBytes]]
) -> None:
    """Writes the files, and an index if there are several files."""
    files: dict[str, Sequence[TensorSpec]] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else "model.safetensors"
        write_safetensors(folder / name, shard, islice(tensors, len(shard)))
        files[name] = shard
    extra = next(tensors, None)  # The iterator must be exhausted, because the ranks of an export wait until then.
    assert extra is None, f"{extra}: not in the list of shapes"
    if shards[1:]:
        write_weight_index(folder / WEIGHT_INDEX, files)


READ_BYTES = 64 << 20


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    *,
    model_folder: Path,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``target`` like `export_hf_folder`, with 64 MiB or one tensor in memory, and replaces no folder.

    ``checkpoint`` is the folder of one model in a checkpoint and has provenance.json. ``model_folder`` provides the
    configuration and the tokenizer. ``family`` is the name or file of a further family. ``dtype`` is "float32" or
    "bfloat16"; None keeps each tensor's dtype in ``model_folder``. Raises ValueError if the checkpoint is corrupt, of a
    critic, or of a different model than ``model_folder``. Raises OSError if ``target`` cannot be written.
    """
    provenance = read_provenance(checkpoint)
    if provenance.head != "policy":
        raise ValueError(f"checkpoint {checkpoint} is of a {provenance.head}: only a policy can be exported.")
    architecture = folder_architecture(
        model_folder, family=family_key(provenance.family, also=family) or provenance.family
    )
    check_same_numbers(provenance.model, model_numbers(architecture), folder=checkpoint)
    with read_errors_as_valueerror(checkpoint):
        stored = StoredFolder(checkpoint)

    weights = stored_weights(architecture)
    names = [WEIGHTS + rule.hf for weight in weights for rule in weight.rules]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with read_errors_as_valueerror(checkpoint):
            for name, tensor in stored.read(names, bucket_bytes=READ_BYTES):
                yield name.removeprefix(WEIGHTS), tensor
                del tensor  # This frees the tensor before the next tensors are read.

    export_hf_folder(
        fused(tensors(), weights),
        shapes={weight.name: weight.shape for weight in weights},
        own_dtype=provenance.dtype,
        dtype=dtype,
        source_folder=model_folder,
        target=target,
        shard_bytes=shard_bytes,
        copied_prefixes=architecture.copied_prefixes,
        replace=False,
    )

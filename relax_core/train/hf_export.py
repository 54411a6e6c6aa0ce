"""Writes trained weights as a Hugging Face folder that `transformers` and every engine load."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from relax_core.train.atomic_folder import atomic_folder

SHARD_BYTES = 4_000_000_000
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # configuration, tokenizer, chat template; no code, no weights
INDEX = "model.safetensors.index.json"
TIED_OUTPUT = "lm_head.weight"


def export_hf_folder(
    tensors: Iterator[tuple[str, Tensor]], *, source_folder: Path, target: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes ``target``: the weights as safetensors, everything else as in ``source_folder``.

    ``tensors``: (Hugging Face name, tensor); one shard of at most ``shard_bytes`` (or one tensor) is in memory at a
    time. Where config.json ties the embeddings the output weight is left out, as transformers does. config.json gets
    the dtype of the weights. The folder appears whole or not at all and replaces an older one; OSError says what was
    not written, where, and how many bytes are free. ValueError for a source without config.json.
    """
    if not (source_folder / "config.json").is_file():
        raise ValueError(f"model.path={source_folder}: no config.json there. Give a Hugging Face model folder.")
    with atomic_folder(target) as folder:
        for path in sorted(source_folder.iterdir()):
            if path.suffix in COPIED_SUFFIXES and path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tied = bool(config.get("tie_word_embeddings"))
        writer = _ShardWriter(folder, shard_bytes=shard_bytes)
        for name, tensor in tensors:
            if not (tied and name == TIED_OUTPUT):
                writer.add(name, tensor)
        config = _with_dtype(config, writer.finish())
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The weights' dtype under the key that this config uses: older ones say ``torch_dtype``."""
    return config | {"torch_dtype" if "torch_dtype" in config else "dtype": dtype}


class _ShardWriter:
    """Gathers tensors into files of at most ``shard_bytes``; their names tell how many there are, so they come last."""

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._dtype = ""

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self._dtype = self._dtype or str(tensor.dtype).removeprefix("torch.")

    def finish(self) -> str:
        """Writes what is left and the index; returns the dtype of the weights."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            self._path(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self._dtype

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"

    def _flush(self) -> None:
        assert self._pending, "there is at least one tensor"
        try:
            save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        except SafetensorError as error:  # its writer knows no OSError
            raise OSError(errno.EIO, str(error)) from error
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

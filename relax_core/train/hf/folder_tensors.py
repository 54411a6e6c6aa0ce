"""Tensors of a Hugging Face folder that are read only where they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from relax_core.families.folder import weight_files


class StoredTensor:
    """A tensor in a file; cutting a slice out of it reads that slice alone. ``dtype``: safetensors' own word."""

    def __init__(self, slices: Any) -> None:
        self.shape: tuple[int, ...] = tuple(slices.get_shape())
        self.dtype: str = slices.get_dtype()
        self._slices = slices

    def __getitem__(self, cut: Any, /) -> Tensor:
        tensor = self._slices[cut]
        assert isinstance(tensor, Tensor)
        return tensor


def open_safetensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """All tensors of a folder's weights, unread, in the order in which they lie there; ValueError where there are
    none."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"model.path={folder}: no *.safetensors file there. Give a Hugging Face folder with weights.")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, StoredTensor(file.get_slice(name))

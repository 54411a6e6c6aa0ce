"""Streams the weights of a Hugging Face folder: whole tensors, or only the requested slices of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from relax_core.families.folder import weight_files


class StoredTensor:
    """Represents a tensor in a file; indexing reads only the requested slice. ``dtype`` is a safetensors name."""

    def __init__(self, slices: Any) -> None:
        self.shape: tuple[int, ...] = tuple(slices.get_shape())
        self.dtype: str = slices.get_dtype()
        self._slices = slices

    def __getitem__(self, index: Any, /) -> Tensor:
        tensor = self._slices[index]
        assert isinstance(tensor, Tensor)
        return tensor


def open_safetensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yields a `StoredTensor` for each tensor of a folder's weights, in file order, without reading its data.

    Raises ValueError if the folder has no weights.
    """
    return ((name, StoredTensor(file.get_slice(name))) for file, name in _stored(folder))


def read_safetensors(
    folder: Path, *, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder's weights in file order, but only tensors with ``wanted(name)``.

    One tensor is in memory at a time. Raises ValueError if the folder has no weights.
    """
    return ((name, file.get_tensor(name)) for file, name in _stored(folder) if wanted(name))


def _stored(folder: Path) -> Iterator[tuple[Any, str]]:
    files = weight_files(folder)
    if not files:
        raise ValueError(f"model.path={folder} has no *.safetensors file. Give a Hugging Face folder with weights.")
    for path in files:
        if not path.is_file():  # A read from a pipe or a device would never end.
            raise ValueError(f"model.path={folder}: {path.name} is not a regular file. Give a Hugging Face folder.")
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield file, name

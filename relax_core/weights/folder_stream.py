"""Reads the weights of a Hugging Face folder as a stream, as whole tensors or only in the slices that are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from relax_core.families.folder import weight_files


class StoredTensor:
    """Reads only the indexed slice of a tensor in a file; ``dtype`` is safetensors' own name."""

    def __init__(self, slices: Any) -> None:
        self.shape: tuple[int, ...] = tuple(slices.get_shape())
        self.dtype: str = slices.get_dtype()
        self._slices = slices

    def __getitem__(self, index: Any, /) -> Tensor:
        tensor = self._slices[index]
        assert isinstance(tensor, Tensor)
        return tensor


def open_safetensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yields all tensors of a folder's weights unread, in the order in which they are stored.

    Raises ValueError if the folder has no weights.
    """
    return ((name, StoredTensor(file.get_slice(name))) for file, name in _stored(folder))


def read_safetensors(
    folder: Path, *, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder's weights with ``wanted`` names, in the order in which they are stored.

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

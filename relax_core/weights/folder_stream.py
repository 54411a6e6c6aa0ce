"""Reading a Hugging Face folder's weights as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from relax_core.families.folder import weight_files


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder's weights, in the order in which they lie there, one in memory at a time; ValueError
    where there are none."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"model.path={folder}: no *.safetensors file there. Give a Hugging Face folder with weights.")
    for path in files:
        if not path.is_file():  # a pipe or a device would never end
            raise ValueError(f"model.path={folder}: {path.name} is no regular file. Give a Hugging Face folder.")
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)

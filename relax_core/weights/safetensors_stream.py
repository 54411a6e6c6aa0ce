"""A safetensors file as the library lays it out, written tensor by tensor: its header comes from the shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from relax_core.contracts.engine import TensorSpec
from relax_core.weights.safetensors_header import DTYPES, header_bytes


def library_layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorSpec]:
    """(name, dtype, shape) of each tensor → where `safetensors` itself puts them, in the order of the file: by dtype,
    then by name."""
    order = {dtype: place for place, dtype in enumerate(DTYPES)}
    specs, offset = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda one: (order[one[1]], one[0])):
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, nbytes=nbytes))
        offset += nbytes
    return specs


def write_safetensors(path: Path, layout: Iterable[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes what ``layout`` tells of, whatever order it comes in; of ``tensors`` one is held at a time. Raises OSError
    where the disk does not take it."""
    missing = {spec.name: spec for spec in layout}
    header = header_bytes(missing.values())
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            spec = missing.pop(name)
            told = (f"torch.{spec.dtype}", spec.shape)
            assert (str(tensor.dtype), list(tensor.shape)) == told, f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
            data = tensor.detach().cpu().contiguous()
            file.seek(len(header) + spec.offset)
            file.write(data.view(-1).view(torch.uint8).numpy().data)
            del tensor, data  # before the next one is made
    assert not missing, f"tensors that did not come: {list(missing)}"

"""Writes a safetensors file tensor by tensor; the header needs only the names, dtypes and shapes of the tensors.

The safetensors library needs all tensors at once. A file begins with the length of its header in 8 bytes. The header
follows as JSON, padded with spaces. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relax_core.contracts.engine import TensorSpec
from relax_core.families.folder import read_header

if TYPE_CHECKING:
    import torch

LENGTH_BYTES = 8
ALIGNMENT = 8  # The first tensor begins at a multiple of this many bytes.
PIECE_BYTES = 16 << 20
DTYPES = {  # the library's order of tensors in a file
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Describes the location of a tensor in a file; `pieces` reads its bytes. ``dtype`` is torch's name."""

    path: Path
    dtype: str
    shape: Sequence[int]
    offset: int
    nbytes: int

    def pieces(self) -> Iterator[bytes]:
        """Yields the bytes, at most `PIECE_BYTES` at a time."""
        # The file is not mapped, because mapped pages would count as this process's memory.
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, self.nbytes, PIECE_BYTES):
                yield file.read(min(PIECE_BYTES, self.nbytes - first))


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, without a copy.

    ``tensor.numpy()`` would fix the size of the tensor's storage, but time sharing frees the storage of weights.
    """
    buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory while the view exists
    return memoryview(buffer).cast("B")


def stored_bytes(path: Path) -> Iterator[tuple[str, StoredBytes]]:
    """Yields the location of each tensor of a file, in file order; reads only the file's header.

    Raises ValueError as `read_header` does.
    """
    names = {stored: name for name, stored in DTYPES.items()}
    header = read_header(path)
    size = len(header)
    entries: dict[str, dict[str, Any]] = msgspec.json.decode(header)
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda named_entry: named_entry[1]["data_offsets"][0]):
        first, behind = entry["data_offsets"]
        yield (
            name,
            StoredBytes(path, names[entry["dtype"]], entry["shape"], LENGTH_BYTES + size + first, behind - first),
        )


def header_bytes(tensors: Iterable[TensorSpec], *, room: int = 0) -> bytes:
    """Returns header length and header, at least ``room`` bytes in all; raises ValueError for an unsupported dtype."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise ValueError(f"{spec.name}: safetensors has no dtype {spec.dtype}; export one of {', '.join(DTYPES)}")
        offsets = [spec.offset, spec.offset + spec.nbytes]
        entries[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
    header = msgspec.json.encode(entries)
    size = max(room, LENGTH_BYTES + len(header))
    size += -size % ALIGNMENT
    return (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + header.ljust(size - LENGTH_BYTES)


def library_layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> list[TensorSpec]:
    """Sorts tensors (name, dtype, shape) as the `safetensors` library does: by dtype, then by name."""
    import torch

    order = {dtype: index for index, dtype in enumerate(DTYPES)}
    specs, offset = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (order[tensor[1]], tensor[0])):
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, nbytes=nbytes))
        offset += nbytes
    return specs


def write_safetensors(
    path: Path, layout: Iterable[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor | StoredBytes]]
) -> None:
    """Writes the tensors of ``layout`` one at a time and in any order; raises OSError if the disk fails."""
    missing = {spec.name: spec for spec in layout}
    header = header_bytes(missing.values())
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            spec = missing.pop(name)
            file.seek(len(header) + spec.offset)
            if isinstance(tensor, StoredBytes):
                assert (tensor.dtype, list(tensor.shape)) == (spec.dtype, spec.shape), f"{name}: {tensor}"
                file.writelines(tensor.pieces())
                continue
            expected = (f"torch.{spec.dtype}", spec.shape)
            assert (str(tensor.dtype), list(tensor.shape)) == expected, f"{name}: {tensor.dtype} {tuple(tensor.shape)}"
            data = tensor.detach().cpu().contiguous()
            file.write(host_bytes(data))
            del tensor, data  # This frees the tensor before the next tensor is made.
    assert not missing, f"missing tensors: {list(missing)}"


def write_weight_index(path: Path, files: Mapping[str, Iterable[TensorSpec]]) -> None:
    """Writes Hugging Face's index of several weight files, which maps each tensor to its file."""
    tensors = [(spec, name) for name, specs in files.items() for spec in specs]
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec, _ in tensors)},
        "weight_map": {spec.name: name for spec, name in tensors},
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")

"""The header of a safetensors file, which stands before its tensors: 8 bytes of length, then JSON padded with spaces.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relax_core.contracts.engine import TensorSpec

LENGTH_BYTES = 8
ALIGNMENT = 8  # of the first tensor
DTYPES = {  # in the order in which the library lays tensors out
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


def header_bytes(tensors: Iterable[TensorSpec], *, room: int = 0) -> bytes:
    """The header, its length included, at least ``room`` bytes. ValueError for a dtype that the format lacks."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise ValueError(f"{spec.name}: safetensors knows no dtype {spec.dtype}; export one of {', '.join(DTYPES)}")
        place = [spec.offset, spec.offset + spec.nbytes]
        entries[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": place}
    words = msgspec.json.encode(entries)
    size = max(room, LENGTH_BYTES + len(words))
    size += -size % ALIGNMENT
    return (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + words.ljust(size - LENGTH_BYTES)

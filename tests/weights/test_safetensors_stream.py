"""Tests that a streamed file equals the library's file of the same tensors, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import numpy as numpy_library
from safetensors import torch as library
from torch import Tensor

from relax_core.weights.safetensors_stream import DTYPES, library_layout, write_safetensors

FOR_NUMPY = [dtype for dtype in DTYPES if not dtype.startswith(("bfloat", "float8"))]


def some_tensors(dtypes: list[str]) -> dict[str, Tensor]:
    """Makes two tensors of each dtype and of several shapes in random order, including a scalar and an empty tensor."""
    shapes = [(), (0, 4), (3, 7), (5,), (2, 3, 4)]
    names = [f"layers.{number}.{dtype}" for dtype in dtypes for number in (10, 9)]
    random.Random(0).shuffle(names)
    return {
        name: torch.randint(0, 2, shapes[place % len(shapes)]).to(getattr(torch, name.rpartition(".")[2]))
        for place, name in enumerate(names)
    }


def written(path: Path, tensors: dict[str, Tensor]) -> bytes:
    told = [(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()]
    write_safetensors(path, library_layout(told), iter(tensors.items()))
    return path.read_bytes()


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in DTYPES] + [list(DTYPES)], ids=[*DTYPES, "all"])
def test_the_bytes_are_those_of_the_library(dtypes: list[str], tmp_path: Path) -> None:
    tensors = some_tensors(dtypes)
    library.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert written(tmp_path / "ours", tensors) == (tmp_path / "theirs").read_bytes()


def test_the_bytes_are_those_of_the_library_for_numpy(tmp_path: Path) -> None:
    tensors = some_tensors(FOR_NUMPY)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    numpy_library.save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
    assert written(tmp_path / "ours", tensors) == (tmp_path / "theirs").read_bytes()


def test_a_transposed_tensor_arrives_as_it_reads(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    written(tmp_path / "file", {"matrix": matrix.t()})
    assert torch.equal(library.load_file(tmp_path / "file")["matrix"], matrix.t())


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    made: list[StorageWeakRef] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            assert all(ref.expired() for ref in made), "an earlier one is still held"
            tensor = torch.full((64,), float(number))
            made.append(StorageWeakRef(tensor.untyped_storage()))
            yield f"t{number}", tensor
            del tensor

    layout = library_layout((f"t{number}", "float32", (64,)) for number in range(5))
    write_safetensors(tmp_path / "file", layout, tensors())
    assert len(made) == 5


@pytest.mark.parametrize("wrong", [{}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).half()}, {"b": torch.zeros(2)}])
def test_what_was_not_told_of_is_not_written(wrong: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, KeyError)):
        write_safetensors(tmp_path / "file", library_layout([("a", "float32", (2,))]), iter(wrong.items()))

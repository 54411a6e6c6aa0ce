"""Tests that an export copies tensors that Relax does not use: byte for byte and in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_core.train.hf.hf_export import export_hf_folder
from relax_core.train.hf.stored_weights import passed_bytes
from relax_core.weights import safetensors_stream

PREFIXES = ("mtp.", "talker.")


def own_tensors() -> Iterator[tuple[str, Tensor]]:
    yield "model.norm.weight", torch.arange(6.0)
    yield "lm_head.weight", torch.ones(4, 6)


def make_source(folder: Path) -> dict[str, Tensor]:
    """Writes a folder of two files and returns the tensors that the export must copy."""
    torch.manual_seed(0)
    passed = {
        "mtp.fc.weight": torch.randn(5, 7).bfloat16(),
        "mtp.norm.weight": torch.tensor([float("nan"), -0.0, float("inf")]),
        "talker.codes": torch.arange(8),
        "talker.experts.gate_up_proj": torch.randn(2, 3, 4).half(),
        "talker.scale": torch.tensor(3.0, dtype=torch.float64),
    }
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    own = {name: torch.zeros_like(tensor) for name, tensor in own_tensors()}
    first = {name: tensor for name, tensor in passed.items() if name.startswith("mtp.")}
    save_file({**own, **first}, folder / "model-1.safetensors")
    save_file({name: passed[name] for name in passed if name not in first}, folder / "model-2.safetensors")
    return passed


@pytest.mark.parametrize("shard_bytes", [4_000_000_000, 64])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_they_keep_their_bytes(
    tmp_path: Path, shard_bytes: int, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_stream, "PIECE_BYTES", 24)  # a tensor has several pieces; the last is shorter
    passed = make_source(tmp_path)
    assert passed_bytes(tmp_path, PREFIXES) == sum(tensor.nbytes for tensor in passed.values()), (
        "the plan has a different number of bytes"
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in own_tensors()}
    export_hf_folder(
        own_tensors(),
        shapes=shapes,
        own_dtype="float32",
        dtype=dtype,
        source_folder=tmp_path,
        target=tmp_path / "hf",
        shard_bytes=shard_bytes,
        copied_prefixes=PREFIXES,
    )
    found: dict[str, Tensor] = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == {*shapes, *passed}
    for name, tensor in passed.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()
    assert found["model.norm.weight"].tolist() == torch.arange(6.0).tolist()

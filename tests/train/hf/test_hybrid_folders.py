"""Tests that the trainer exports a folder of Qwen3.5 unchanged: names, shapes, dtypes, bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_vision_model
from tiny_trainer import export_folder, make_backend, train_step
from torch import Tensor

from relax_core.contracts.media_file import FolderReader
from relax_core.train.optimizer import frozen_weights
from tests.trees import answers_tree
from tests.vision_models import Seen, text

EXPERTS = "tiny_qwen3_5_moe"


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with one tensor per expert, as transformers writes them. The MTP layer stays unchanged."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, _, part = name.partition(".experts.")
        if not part or name.startswith("mtp."):
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            for half, kind in zip(halves, ("gate", "up") if len(halves) == 2 else ("down",), strict=True):
                found[f"{before}.experts.{expert}.{kind}_proj.weight"] = half.clone()
    return found


def in_half(name: str, tensor: Tensor) -> Tensor:
    kept = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
    return tensor if kept else tensor.bfloat16()


@pytest.mark.parametrize(
    ("name", "dtype", "apart"),
    [("tiny_qwen3_5", "bfloat16", False), (EXPERTS, "float32", False), (EXPERTS, "bfloat16", True)],
)
def test_an_untouched_folder_comes_out_as_it_went_in(tmp_path: Path, name: str, dtype: str, apart: bool) -> None:
    folder = tmp_path / "model"
    make_vision_model(folder, name)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if apart:
        tensors = one_by_one(tensors)
    if dtype == "bfloat16":
        tensors = {key: in_half(key, tensor) for key, tensor in tensors.items()}
    save_file(tensors, file)
    backend = make_backend(folder, family=name.removeprefix("tiny_"), dtype=dtype)
    for key, tensor in backend.export():
        assert tensor.dtype == tensors[key].dtype, f"a weight update has {key} in the folder's dtype"
    found = export_folder(backend, folder, tmp_path / "hf")
    assert set(found) == set(tensors)
    assert any(key.startswith("mtp.") for key in found)
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("name", ["tiny_qwen3_5", EXPERTS])
def test_after_a_step_exactly_the_trained_tensors_differ(tmp_path: Path, name: str) -> None:
    folder, frozen = tmp_path / "model", ("projector",)
    make_vision_model(folder, name)
    seen = Seen(folder, tmp_path / "media")
    ids, media = seen.prompt(text(5), seen.image(2, 3), text(4))
    random = torch.Generator().manual_seed(0)
    advantages = torch.randn(12, generator=random).numpy()
    group = answers_tree("g", ids, [5, 7], text(12), logprobs=-1.0, advantages=advantages)
    reader = FolderReader(tmp_path / "media")
    backend = make_backend(folder, family=name.removeprefix("tiny_"), frozen=frozen, media=reader)
    train_step(backend, [[replace(group, media=media)]])
    before, after = load_file(folder / "model.safetensors"), export_folder(backend, folder, tmp_path / "hf")
    assert before.keys() == after.keys()
    same = {key for key in before if torch.equal(before[key], after[key])}
    passed, kept = {key for key in before if key.startswith("mtp.")}, frozen_weights(backend.architecture, frozen)
    assert passed and kept
    assert same == passed | kept

"""Tests import and export of fused experts and towers: published layout, transformers' layout, square experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_vision_model
from torch import Tensor
from transformers import AutoModelForImageTextToText

from relax_core.families.folder import folder_architecture
from relax_core.train.hf.stored_weights import fused, stored_weights, weight_problems
from relax_core.weights.folder_stream import open_safetensors

EXPERTS = "model.language_model.layers.1.mlp.experts."


def through_the_rules(folder: Path) -> dict[str, Tensor]:
    """Splits a folder's tensors as the weight rules say, joins the parts again and returns the tensors."""
    stored = stored_weights(folder_architecture(folder))
    files = dict(open_safetensors(folder))
    parts = ((name, part[:]) for weight in stored for name, part in weight.parts(files[weight.name]))
    return dict(fused(parts, stored))


def expert_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the experts' tensors of one layer, split by the weight rules."""
    stored = stored_weights(folder_architecture(folder))
    files = dict(open_safetensors(folder))
    layer = [weight for weight in stored if weight.name.startswith(EXPERTS)]
    return {name: part[:] for weight in layer for name, part in weight.parts(files[weight.name])}


@pytest.mark.parametrize("name", ["tiny_qwen3_vl", "tiny_qwen3_vl_moe"])
def test_the_published_layout_goes_in_and_out(tmp_path: Path, name: str) -> None:
    make_vision_model(tmp_path, name)
    source, ours = load_file(tmp_path / "model.safetensors"), through_the_rules(tmp_path)
    assert weight_problems(tmp_path, folder_architecture(tmp_path)) == []
    assert source.keys() == ours.keys()
    for weight, tensor in source.items():
        assert tensor.shape == ours[weight].shape and torch.equal(tensor, ours[weight]), weight
    assert source["model.visual.patch_embed.proj.weight"].dim() == 5


def test_an_expert_is_the_one_of_transformers(tmp_path: Path) -> None:
    """Compares each expert's matrices with the experts that transformers loads from the published folder."""
    make_vision_model(tmp_path, "tiny_qwen3_vl_moe")
    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path)
    experts = theirs.model.language_model.layers[1].mlp.experts
    ours = expert_tensors(tmp_path)
    for number in range(8):
        gate, up = experts.gate_up_proj[number].chunk(2)
        assert torch.equal(ours[f"{EXPERTS}{number}.gate_proj.weight"], gate)
        assert torch.equal(ours[f"{EXPERTS}{number}.up_proj.weight"], up)
        assert torch.equal(ours[f"{EXPERTS}{number}.down_proj.weight"], experts.down_proj[number])


def write_untransposed(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in weights.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_layout_of_a_model_that_transformers_made_is_read_too(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "tiny_qwen3_vl_moe")
    published = load_file(tmp_path / "model.safetensors")
    write_untransposed(tmp_path)
    assert weight_problems(tmp_path, folder_architecture(tmp_path)) == []
    ours = through_the_rules(tmp_path)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in published.items())  # in the published layout


@pytest.mark.parametrize(("width", "other_tensor"), [(36, "down_proj"), (72, "gate_up_proj")])
def test_a_square_expert_in_the_wrong_layout_is_caught(tmp_path: Path, width: int, other_tensor: str) -> None:
    """The first tensor is square, so its shape says nothing about the layout. The second tensor shows the layout."""
    make_vision_model(tmp_path, "tiny_qwen3_vl_moe", moe_intermediate_size=width)
    published, architecture = load_file(tmp_path / "model.safetensors"), folder_architecture(tmp_path)
    ours = through_the_rules(tmp_path)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in published.items())
    write_untransposed(tmp_path)
    problems = weight_problems(tmp_path, architecture)
    assert len(problems) == 4 and all(f".experts.{other_tensor} has shape" in problem for problem in problems)
    with pytest.raises(ValueError, match=f"experts.{other_tensor} has shape"):
        through_the_rules(tmp_path)

"""Compares the memory plan's formula for activations with the tensors that autograd saves in Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from branches import cpu_branch_only
from tiny_trainer import make_backend, make_groups

from benchmarks.family_models import make_family_model
from relax_core.plan.memory_terms import FLOAT, activation_values
from relax_core.plan.model_dimensions import read_dimensions


@cpu_branch_only("the stand-in of FlexAttention saves other tensors than the kernel, whose formula needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen2", "mistral"])
def test_activations_are_what_autograd_saves(tmp_path: Path, variant: str, dtype: str) -> None:
    make_family_model(tmp_path, variant)
    backend = make_backend(tmp_path, family=variant, dtype=dtype)
    widened = dtype == "bfloat16"
    batch = backend.pack(make_groups([[30] * 4] * 3, prompt_lengths=[25] * 3))
    layout = batch.layout
    parameters = {parameter.untyped_storage().data_ptr() for parameter in backend.model.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # Keep a reference to the tensor, because otherwise its address may be reused.
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backend.model_chunks[0](batch)
    assert hidden.requires_grad
    size = 2 if widened else FLOAT
    model = read_dimensions(json.loads((tmp_path / "config.json").read_text()), name="tiny")
    layers = len(layout.token_ids) * model.layers * activation_values(model, widened=widened) * size
    final_norm = len(layout.token_ids) * model.hidden * (2 * FLOAT if widened else FLOAT)
    mask = batch.attention.mask.nbytes  # attention uses a dense mask for a small stream
    assert sum(size for size, _ in saved.values()) == pytest.approx(layers + final_norm + mask, rel=0.03)

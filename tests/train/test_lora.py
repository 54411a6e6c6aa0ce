"""Tests training of LoRA factors: gradients, layouts, the reference and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model
from tiny_trainer import dp_groups, make_backend, make_critic, train_step

from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, StoredFolder
from relax_core.weights.lora_merge import Lora
from tests.train.lora_ranks import LAYOUTS, LORA, SAVED, build
from tests.train.rank_server import run_programme


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("lora")
    run_programme("lora_ranks.py", path)
    return path


def results(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt", weights_only=False)


def gap(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - expected[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_the_weights_of_one_rank(folder: Path, layout: str) -> None:
    found, alone = results(folder, layout), results(folder, "moe_alone" if layout.startswith("moe") else "dense_alone")
    assert gap(found["merged"], alone["merged"]) <= 1e-6
    assert gap(alone["merged"], alone["first"]["merged"]) > 1e-3, "the weights moved"
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for (name, a, b, scale), (other, other_a, other_b, other_scale) in zip(
        found["factors"], alone["factors"], strict=True
    ):
        assert (name, scale) == (other, other_scale)
        assert float((a - other_a).abs().max()) <= 1e-6
        assert float((b - other_b).abs().max()) <= 1e-6


@pytest.mark.parametrize("layout", ["dense_alone", "moe_alone", *LAYOUTS])
def test_the_base_and_the_log_probs_of_the_reference_stay(folder: Path, layout: str) -> None:
    found = results(folder, layout)
    assert gap(found["base"], found["first"]["base"]) == 0
    assert gap(found["first"]["merged"], found["first"]["base"]) == 0, "B is 0 at first"
    before, after = found["reference"], found["reference after"]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))


def test_merged_weights_are_base_plus_scaled_product(folder: Path) -> None:
    found = results(folder, "dense_alone")
    adapted = {name for name, *_ in found["factors"]}
    assert {name.split(".")[-2] for name in adapted} == set(LORA.targets)
    for name, a, b, scale in found["factors"]:
        assert scale == 2.0
        expected = found["base"][name].double() + scale * b.double() @ a.double()
        assert float((found["merged"][name] - expected).abs().max()) <= 1e-6
    for name in found["base"].keys() - adapted:
        assert torch.equal(found["merged"][name], found["base"][name])


def test_gradients_of_factors_are_projections_of_the_full_gradient(folder: Path) -> None:
    """With W + s·B·A in each layer, dA = s·Bᵀ·dW and dB = s·dW·Aᵀ; dW comes from a model without LoRA."""
    found = results(folder, "gradients")
    for (name, of_a, of_b), (_, a, b) in zip(found["factors"], found["values"], strict=True):
        full = found["weights"][name]
        assert of_a == pytest.approx(LORA.scale * b.T @ full, abs=1e-6)
        assert of_b == pytest.approx(LORA.scale * full @ a.T, abs=1e-6)
        assert float(of_a.abs().max()) > 1e-4 and float(of_b.abs().max()) > 1e-4


def test_a_checkpoint_has_only_factors_and_loads_on_one_rank(folder: Path) -> None:
    names = [name for name in StoredFolder(folder / "checkpoint").tensors() if name.startswith(WEIGHTS)]
    assert names and all("lora_" in name for name in names), names
    backend = build(folder, "dense")
    backend.load(folder / "checkpoint")
    assert gap(dict(backend.export()), results(folder, SAVED)["merged"]) == 0
    train_step(backend, dp_groups(), step=3)
    other = make_backend(folder / "dense", lora=Lora(rank=4, alpha=4.0, targets=LORA.targets, rslora=False))
    with pytest.raises(ValueError, match=r"model\.lora.*alpha"):
        other.load(folder / "checkpoint")
    with pytest.raises(ValueError, match=r"model\.lora.*rank 4 there, none here"):
        make_backend(folder / "dense").load(folder / "checkpoint")


def test_a_rank_above_the_size_of_a_matrix_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    with pytest.raises(ValueError, match=r"model\.lora\.rank=512: .*k_proj"):
        make_backend(tmp_path, lora=Lora(rank=512, alpha=1.0, targets=("k_proj",), rslora=False))


def test_a_critic_trains_all_its_weights(tmp_path: Path) -> None:
    make_model(tmp_path)
    critic = make_critic(tmp_path, lora=LORA)
    assert all(parameter.requires_grad for model in critic.models for parameter in model.parameters())


def test_bfloat16_factors_have_float32_main_weights(tmp_path: Path) -> None:
    make_model(tmp_path)
    backend = make_backend(tmp_path, lora=LORA, dtype="bfloat16", optimizer={"lr": 1e-2})
    before = {name: tensor.clone() for name, tensor in backend.export()}
    train_step(backend, dp_groups(), step=0)
    after = dict(backend.export())
    assert after["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert gap({k: v.float() for k, v in after.items()}, {k: v.float() for k, v in before.items()}) > 1e-4

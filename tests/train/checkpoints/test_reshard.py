"""Tests that another layout continues from a checkpoint with the same state to the bit and the same next step."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from reshard_rank import CHAINS
from safetensors.torch import load_file
from tiny_models import make_models
from tiny_trainer import dp_groups, make_backend, train_step
from worker_group_layouts import RANKS

from benchmarks.parity_media import Items, make_case
from relax_core.contracts.media_file import FolderReader
from relax_core.families.folder import folder_architecture
from relax_core.train.hf.stored_weights import fused, stored_weights

LINKS = [f"{name}-{step}" for name, (*_, layouts) in CHAINS.items() for step, _ in enumerate(pairwise(layouts))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def saved(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the checkpoints of all chains."""
    folder: Path = tmp_path_factory.mktemp("chains")
    train_on_pictures(models, folder)
    ended = run_ranks("reshard_rank.py", [(models, folder)] * RANKS, timeout_s=900.0)
    assert [status for status, _ in ended] == [0] * RANKS, ended
    assert "random streams start anew" in ended[0][1]
    return folder


def train_on_pictures(models: Path, folder: Path) -> None:
    """Saves sees-alone after a step of one rank, in which every weight of the tower has a gradient."""
    items = Items(models / "sees", folder / "media")
    backend = make_backend(
        models / "sees", family="qwen3_vl", optimizer={"eps": 1e-4}, media=FolderReader(folder / "media")
    )
    train_step(backend, [make_case("video", items)])
    backend.save(folder / "sees-alone")


def assert_equal_to_the_bit(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from relax_core.train.checkpoints.checkpoint_shards import StoredFolder

    one = StoredFolder(folder)
    return dict(one.read([name for name in one.tensors() if not name.startswith("random/")], bucket_bytes=1 << 20))


def kinds(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name.split("/")[0] for name in tensors}


@pytest.mark.parametrize("link", LINKS)
def test_another_layout_has_the_same_state_to_the_bit(models: Path, saved: Path, link: str) -> None:
    before, after = stored(saved / link), stored(saved / f"{link}-again")
    assert_equal_to_the_bit(before, after)
    assert kinds(before) == {"weights", "exp_avg", "exp_avg_sq"} | ({"main"} if link.startswith("tied") else set())
    exported = load_file(saved / f"{link}.safetensors")
    wanted = stored_weights(folder_architecture(models / CHAINS[link.split("-")[0]][0]))
    rules = [rule.hf for one in wanted for rule in one.rules]
    assert {f"weights/{name}" for name in rules} == {name for name in before if name.startswith("weights/")}
    joined = dict(fused(((name, before[f"weights/{name}"]) for name in rules), wanted))
    assert joined.keys() == exported.keys()
    assert all(torch.equal(tensor, joined[name]) for name, tensor in exported.items())


def test_a_model_that_sees_goes_to_tp2_pp2_and_back_to_one_rank(models: Path, saved: Path, tmp_path: Path) -> None:
    """Both ways weights and moments keep their bits, those of the tower too, which has learned from pictures."""
    alone = stored(saved / "sees-alone")
    assert all(bool(tensor.any()) for name, tensor in alone.items() if name.startswith("exp_avg/model.visual."))
    assert_equal_to_the_bit(alone, stored(saved / "sees-alone-again"))
    backend = make_backend(models / "sees", family="qwen3_vl", optimizer={"eps": 1e-4})
    backend.load(saved / "sees-0")
    backend.save(tmp_path / "back")
    assert CHAINS["sees"][-1][0] == {"tp": 2, "pp": 2, "distributed_optimizer": False}
    assert_equal_to_the_bit(stored(saved / "sees-0"), stored(tmp_path / "back"))


def train_alone(models: Path, name: str, steps: range, *, load: Path | None = None) -> Any:
    model, family, dtype, _ = CHAINS[name]
    backend = make_backend(models / model, family=family, dtype=dtype, optimizer={"eps": 1e-4})
    if load is not None:
        backend.load(load)
    for step in steps:
        train_step(backend, dp_groups(), step=step)
        yield step, {key: tensor.clone() for key, tensor in backend.export()}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_every_step_is_that_of_a_run_that_never_stopped(models: Path, saved: Path, name: str) -> None:
    for step, weights in train_alone(models, name, range(len(CHAINS[name][-1]))):
        chained = load_file(saved / f"{name}-{step}.safetensors")
        for key, tensor in weights.items():
            torch.testing.assert_close(chained[key], tensor, atol=2e-6, rtol=0, msg=f"{key} after step {step}")


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("step", [0, 2])
def test_one_rank_goes_on_with_what_four_saved(
    models: Path, saved: Path, name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="relax_core.train.checkpoints.model_checkpoint")
    chained = load_file(saved / f"{name}-{step + 1}.safetensors")
    for _, weights in train_alone(models, name, range(step + 1, step + 2), load=saved / f"{name}-{step}"):
        for key, tensor in weights.items():
            torch.testing.assert_close(chained[key], tensor, atol=1e-6, rtol=0, msg=key)
    assert any("random streams start anew from the seed" in record.getMessage() for record in caplog.records)

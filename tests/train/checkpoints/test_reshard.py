"""Tests that a run can continue from a checkpoint in another layout: same state bit for bit, same next step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reshard_rank import CHAINS, SLOW
from safetensors.torch import load_file
from tiny_models import make_models
from tiny_trainer import RANKS, dp_groups, make_backend, train_step

from benchmarks.parity_media import HYBRID, HYBRID_EXPERTS, Items, make_case, make_model
from benchmarks.parity_omni import OmniItems, make_omni_case, make_omni_model
from relax_core.contracts.media_file import FolderReader
from relax_core.families.folder import folder_architecture
from relax_core.train.hf.stored_weights import fused, stored_weights
from tests.train.rank_server import run_ranks


def of_chains(found: Iterable[str]) -> list[Any]:
    """Returns test parameters that begin with a chain's name. Parameters of slow chains are marked soak."""
    return [pytest.param(chain, marks=pytest.mark.soak) if chain.split("-")[0] in SLOW else chain for chain in found]


LINKS = [f"{name}-{step}" for name, (*_, layouts) in CHAINS.items() for step, _ in enumerate(pairwise(layouts))]

# For chains that begin with one rank: the media of this rank's step, and the towers with gradients from these media.
WITH_ITEMS = {
    "sees": ("video", ("model.visual.",)),
    "omni": ("four kinds", ("thinker.visual.", "thinker.audio_tower.")),
    "hybrid": ("branches", ("model.visual.",)),
    "hybrid_moe": ("branches", ("model.visual.",)),
}


class Saved:
    """Makes the checkpoints of chains at the first request: first only slow chains, or only fast chains."""

    def __init__(self, models: Path, folder: Path) -> None:
        self._models, self._folder = models, folder
        self._made: set[bool] = set()

    def of(self, chain: str) -> Path:
        """Returns the folder with the checkpoints of ``chain``."""
        if (slow := chain in SLOW) not in self._made:
            names = [name for name in CHAINS if (name in SLOW) is slow]
            for name in names:
                if name in WITH_ITEMS:
                    train_on_items(self._models, self._folder, name)
            ended = run_ranks("reshard_rank.py", [(self._models, self._folder, *names)] * RANKS, timeout_s=900.0)
            assert [status for status, _ in ended] == [0] * RANKS, ended
            assert "random streams start anew" in ended[0][1]
            self._made.add(slow)
        return self._folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    make_models(folder)
    make_omni_model(folder / "omni")
    make_model(folder / "hybrid", HYBRID)
    make_model(folder / "hybrid_moe", HYBRID_EXPERTS)
    return folder


@pytest.fixture(scope="module")
def saved(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(models, tmp_path_factory.mktemp("chains"))


def train_on_items(models: Path, folder: Path, name: str) -> None:
    """Saves <name>-alone after a step of one rank. In this step every weight of the towers has a gradient."""
    model, family, *_ = CHAINS[name]
    case = WITH_ITEMS[name][0]
    if name == "omni":
        groups = make_omni_case(case, OmniItems(models / model, folder / name))
    else:
        groups = make_case(case, Items(models / model, folder / name))
    backend = make_backend(models / model, family=family, optimizer={"eps": 1e-4}, media=FolderReader(folder / name))
    train_step(backend, [groups])
    backend.save(folder / f"{name}-alone")


def assert_equal_to_the_bit(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from relax_core.train.checkpoints.checkpoint_shards import StoredFolder

    stored_folder = StoredFolder(folder)
    return dict(
        stored_folder.read(
            [name for name in stored_folder.tensors() if not name.startswith("random/")], bucket_bytes=1 << 20
        )
    )


def kinds(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name.split("/")[0] for name in tensors}


@pytest.mark.parametrize("link", of_chains(LINKS))
def test_another_layout_has_the_same_state_to_the_bit(models: Path, saved: Saved, link: str) -> None:
    chain = link.split("-")[0]
    folder = saved.of(chain)
    before, after = stored(folder / link), stored(folder / f"{link}-again")
    assert_equal_to_the_bit(before, after)
    assert kinds(before) == {"weights", "exp_avg", "exp_avg_sq"} | ({"main"} if link.startswith("tied") else set())
    exported = load_file(folder / f"{link}.safetensors")
    wanted = stored_weights(folder_architecture(models / CHAINS[chain][0]))
    rules = [rule.hf for weight in wanted for rule in weight.rules]
    assert {f"weights/{name}" for name in rules} == {name for name in before if name.startswith("weights/")}
    joined = dict(fused(((name, before[f"weights/{name}"]) for name in rules), wanted))
    assert joined.keys() == exported.keys()
    assert all(torch.equal(tensor, joined[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("name", of_chains(WITH_ITEMS))
def test_four_ranks_take_over_from_one_and_give_back(models: Path, saved: Saved, tmp_path: Path, name: str) -> None:
    """In both directions, weights and moments keep their bits, also in the towers."""
    folder = saved.of(name)
    alone = stored(folder / f"{name}-alone")
    of_towers = [key for key in alone if key.startswith(tuple(f"exp_avg/{item}" for item in WITH_ITEMS[name][1]))]
    assert of_towers and all(bool(alone[key].any()) for key in of_towers)
    assert_equal_to_the_bit(alone, stored(folder / f"{name}-alone-again"))
    model, family, _, layouts = CHAINS[name]
    assert {"tp": 2, "pp": 2, "distributed_optimizer": False}.items() <= layouts[0].items()
    backend = make_backend(models / model, family=family, optimizer={"eps": 1e-4})
    backend.load(folder / f"{name}-0")
    backend.save(tmp_path / "back")
    assert_equal_to_the_bit(stored(folder / f"{name}-0"), stored(tmp_path / "back"))


def train_alone(models: Path, name: str, steps: range, *, load: Path | None = None) -> Any:
    model, family, dtype, _ = CHAINS[name]
    backend = make_backend(models / model, family=family, dtype=dtype, optimizer={"eps": 1e-4})
    if load is not None:
        backend.load(load)
    for step in steps:
        train_step(backend, dp_groups(), step=step)
        yield step, {key: tensor.clone() for key, tensor in backend.export()}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_every_step_is_that_of_a_run_that_never_stopped(models: Path, saved: Saved, name: str) -> None:
    for step, weights in train_alone(models, name, range(len(CHAINS[name][-1]))):
        chained = load_file(saved.of(name) / f"{name}-{step}.safetensors")
        for key, tensor in weights.items():
            torch.testing.assert_close(chained[key], tensor, atol=2e-6, rtol=0, msg=f"{key} after step {step}")


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("step", [0, 2])
def test_one_rank_goes_on_with_what_four_saved(
    models: Path, saved: Saved, name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="relax_core.train.checkpoints.model_checkpoint")
    folder = saved.of(name)
    chained = load_file(folder / f"{name}-{step + 1}.safetensors")
    for _, weights in train_alone(models, name, range(step + 1, step + 2), load=folder / f"{name}-{step}"):
        for key, tensor in weights.items():
            torch.testing.assert_close(chained[key], tensor, atol=1e-6, rtol=0, msg=key)
    assert any("random streams start anew from the seed" in record.getMessage() for record in caplog.records)

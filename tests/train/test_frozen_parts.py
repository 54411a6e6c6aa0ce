"""Tests `model.freeze` and `optimizer.tower_lr`: frozen parts do not change, others train as in a full run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_ranks import (
    CASES,
    CASES_OF_LAYOUT,
    LAYOUTS,
    OPTIMIZER,
    SAVED,
    STEPS,
    STEPS_OF_LAYOUTS,
    batches_of,
    build,
    exported,
    part_of_weight,
)
from tiny_trainer import make_critic, train_step

from tests.train.rank_server import run_programme


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    run_programme("frozen_ranks.py", path)
    return path


def found_in(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_stays_and_the_rest_trains_as_without(folder: Path, case: str) -> None:
    """After one step the trained weights equal the weights of a run without frozen parts."""
    single = found_in(folder, "single")
    model, frozen = CASES[case]
    expected = math.hypot(*(norm for part, norm in single["norms"][model].items() if part not in frozen))
    runs = [(single[case], STEPS, True)]
    for layout in (layout for layout in LAYOUTS if case in CASES_OF_LAYOUT[layout]):
        ranks = [found_in(folder, f"rank{rank}")[layout][case] for rank in range(2)]
        assert ranks[0]["grad_norms"] == ranks[1]["grad_norms"], layout
        assert ranks[0]["grad_norms"] == pytest.approx(single[case]["grad_norms"][:STEPS_OF_LAYOUTS], rel=1e-3)
        runs += [(port, STEPS_OF_LAYOUTS, rank == 0) for rank, port in enumerate(ranks)]
    for run, steps, exports in runs:
        assert run["grad_norms"][0] == pytest.approx(expected, rel=1e-4) and len(run["grad_norms"]) == steps
        assert (run["wrong"], run["changed"], run["still"]) == (0, [], [])
        assert bool(run["gaps"]) == exports and all(gap <= 2e-5 for gap in run["gaps"].values()), run["gaps"]
    if case == "the tower alone":  # stages after the first have no trainable parameters
        assert [found_in(folder, f"rank{rank}")["pp2"][case]["trained"] > 0 for rank in range(2)] == [True, False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_from_layout_to_layout(folder: Path, layout: str) -> None:
    assert found_in(folder, "rank0")[layout][SAVED]["resumed"] <= 2e-5


def test_another_freeze_set_is_refused(folder: Path) -> None:
    backend = build(folder, SAVED, frozen=("language",))
    assert backend.frozen_weights == {name for name in backend.weight_shapes if part_of_weight(name) == "language"}
    message = r"\[projector,language\] of the model were frozen .*\[language\] are frozen.*model\.freeze="
    with pytest.raises(ValueError, match=message):
        backend.load(folder / "pp2")


def test_the_tower_has_a_learning_rate_of_its_own(folder: Path) -> None:
    moved = []
    for tower_lr in (None, 1e-4):
        backend = build(folder, SAVED, frozen=(), optimizer={**OPTIMIZER, "lr": 1e-3, "tower_lr": tower_lr})
        before = exported(backend)
        train_step(backend, batches_of(folder, "sees"))
        moved.append({name: tensor - before[name] for name, tensor in exported(backend).items()})
    assert {part_of_weight(name) for name in moved[0]} == {"vision", "projector", "language"}
    for name, step in moved[0].items():
        factor = 0.1 if part_of_weight(name) == "vision" else 1.0
        torch.testing.assert_close(moved[1][name], factor * step, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("sharded", [False, True])
def test_bfloat16_weights_that_are_frozen_keep_their_bits(folder: Path, tmp_path: Path, sharded: bool) -> None:
    case = "the router alone"
    settings = {"dtype": "bfloat16", "distributed_optimizer": sharded, "optimizer": {**OPTIMIZER, "lr": 0.1}}
    backend = build(folder, case, **settings)
    before = exported(backend)
    train_step(backend, batches_of(folder, "experts"))
    after = exported(backend)
    assert {name for name in before if not before[name].equal(after[name])} == {
        name for name in before if part_of_weight(name) == "router"
    }
    backend.save(tmp_path / "saved")
    again = build(folder, case, **settings)
    again.load(tmp_path / "saved")
    assert all(tensor.equal(after[name]) for name, tensor in exported(again).items())


def test_a_critic_freezes_the_same_parts_and_never_its_head(folder: Path) -> None:
    critic = make_critic(folder / "experts", family="qwen3_moe", frozen=("language", "router"), optimizer=OPTIMIZER)
    before = {name: parameter.detach().clone() for name, parameter in critic.model.named_parameters()}
    train_step(critic, batches_of(folder, "experts"))
    changed = {name for name, parameter in critic.model.named_parameters() if not parameter.equal(before[name])}
    assert changed == {"value_head.weight", "value_head.bias"}


def test_a_gradient_that_is_not_finite_is_named_where_others_are_frozen(folder: Path) -> None:
    backend = build(folder, "the router alone")
    backend.begin_step(2)
    backend.model_chunks[0].buffers[0].grad_data[:] = torch.nan
    backend.accumulate(batches_of(folder, "experts")[0])
    with pytest.raises(FloatingPointError, match=r"the first such tensor is model\.layers\.\d\.mlp\.gate\.weight"):
        backend.finish_step()

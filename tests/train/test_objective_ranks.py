"""Tests that updates of SFT, DPO and KTO do not depend on the micro-batches and the parallel layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.rank_server import run_programme

CASES = [("each", 0), ("mixed", 0), *((layout, rank) for layout in ("tp2", "pp2", "cp2", "dp2") for rank in range(2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("objectives")
    run_programme("objective_ranks.py", path)
    return path


def updates(folder: Path, name: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
@pytest.mark.parametrize(("case", "rank"), CASES)
def test_an_update_is_that_of_one_micro_batch(folder: Path, objective: str, case: str, rank: int) -> None:
    ours, expected = updates(folder, f"{objective}.{case}.{rank}"), updates(folder, f"{objective}.one.0")
    if objective == "dpo":  # The first margins are 0 up to rounding, so rounding decides how many are positive.
        del ours[0]["preference_accuracy"], expected[0]["preference_accuracy"]
    for own, wanted in zip(ours, expected, strict=True):
        assert own == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    if rank:
        return  # Rank 0 exports the weights of all ranks.
    found = load_file(folder / f"{objective}.{case}.{rank}.safetensors")
    weights = load_file(folder / f"{objective}.one.0.safetensors")
    assert found.keys() == weights.keys()
    gaps = {name: float((weight - weights[name]).abs().max()) for name, weight in found.items()}
    assert max(gaps.values()) <= 1e-5, gaps


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_the_weights_move_by_far_more_than_the_tolerance(folder: Path, objective: str) -> None:
    start, end = load_file(folder / "model.safetensors"), load_file(folder / f"{objective}.one.0.safetensors")
    assert max(float((end[name] - start[name]).abs().max()) for name in end) > 1e-2


def test_the_loss_begins_at_its_known_value_and_falls(folder: Path) -> None:
    first, second, third = updates(folder, "dpo.one.0")
    assert first["loss"] == pytest.approx(math.log(2) + 0.5 * first["chosen_surprisal"], abs=1e-5)
    assert first["preference_margin"] == pytest.approx(0.0, abs=1e-5)
    assert first["loss"] > second["loss"] > third["loss"]
    first, second, third = updates(folder, "kto.one.0")
    assert first["loss"] == pytest.approx((3 * 1.0 + 2 * 1.5) / 5 / 2, abs=1e-5), "σ(0) with the weights of five rows"
    assert first["kl"] == pytest.approx(0.0, abs=1e-5) and second["kl"] > 0.1 and third["kl"] > 0.1
    assert first["loss"] > second["loss"] > third["loss"]
    first, second, third = updates(folder, "sft.one.0")
    assert first["loss"] == pytest.approx(first["surprisal"], abs=1e-6), "the denominator is the number of tokens"
    assert first["loss"] > second["loss"] > third["loss"]

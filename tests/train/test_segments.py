"""An episode counts as one, whatever segments it has: cut into some of equal contexts, it trains as it did whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_processes import run_programme
from safetensors.torch import load_file
from segments_rank import CASES, LAYOUTS, Chosen, make_groups, single, with_columns

REACH = 1e-6
COUNTS = ("tokens", "samples")
OF_MICRO_BATCHES = ("ratio_low", "ratio_high")  # quantiles of a micro-batch, which hold other episodes in other layouts


def figures_of(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")


def assert_the_same(folder: Path, name: str, *, gradients: bool) -> None:
    """Compares all cases of a file with those of the whole episodes in a single process."""
    (figures, tensors), (expected, expected_tensors) = figures_of(folder, name), figures_of(folder, "whole")
    assert figures.keys() == expected.keys() == CASES.keys()
    for case, one in figures.items():
        assert {key: one[key] for key in COUNTS} == {key: expected[case][key] for key in COUNTS}, case
        assert one["loss"] == pytest.approx(expected[case]["loss"], abs=REACH), case
        assert one["grad_norm"] == pytest.approx(expected[case]["grad_norm"], rel=1e-5), case
        assert one["grad_norm"] > 1e-3, case
        own, wanted = (
            {key: value for key, value in of_case["algorithm"].items() if key not in OF_MICRO_BATCHES}
            for of_case in (one, expected[case])
        )
        assert own == pytest.approx(wanted, rel=1e-4, abs=1e-6), case
    if gradients:
        assert tensors.keys() == expected_tensors.keys()
        for key, tensor in tensors.items():
            difference = float((tensor - expected_tensors[key]).abs().max())
            assert difference <= REACH * max(1.0, float(expected_tensors[key].abs().max())), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("segments")
    run_programme("segments_rank.py", path)
    return path


def test_the_cut_episodes_have_other_rows_and_the_same_tokens() -> None:
    whole, cut = make_groups()
    assert sum(len(one.leaves) for tree in cut for one in tree.episodes) > len(cut) * 4 + 3
    assert sum(tree.computed_rows for tree in cut) > 1.2 * sum(tree.computed_rows for tree in whole)
    for one, other in zip(whole, cut, strict=True):
        assert all(len(episode.leaves) == 1 for episode in one.episodes)
        assert np.array_equal(one.token_ids[one.tokens[1]], other.token_ids[other.tokens[1]])
        assert np.array_equal(one.lengths, other.lengths)


@pytest.mark.parametrize("case", CASES)
def test_segments_do_not_change_advantages(case: str) -> None:
    chosen = Chosen()
    chosen.choose(case)
    whole, cut = make_groups()
    logprobs = np.linspace(-3.0, -0.1, sum(len(tree.tokens[1]) for tree in whole), dtype=np.float32)
    made = [with_columns(trees, logprobs, case, chosen) for trees in (whole, cut)]
    for one, other in zip(*made, strict=True):
        assert np.array_equal(one.extras["advantages"], other.extras["advantages"])


def test_segments_change_neither_loss_nor_gradient(tmp_path: Path) -> None:
    single(tmp_path)
    assert_the_same(tmp_path, "cut", gradients=True)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_change_nothing_in_any_layout(folder: Path, layout: str) -> None:
    assert_the_same(folder, "cut", gradients=True)
    for rank in range(2):
        assert_the_same(folder, f"{layout}.{rank}", gradients=rank == 0)  # which gathers them

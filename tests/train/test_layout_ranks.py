"""Tests that all ranks of a layout agree on the step's metrics, the top tokens, and the errors that stop a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.rank_server import run_programme

LAYOUTS = ["tp2", "cp2", "pp2", "dp2 overlap"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("ranks")
    run_programme("layout_ranks.py", path)
    return path


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def of_both_ranks(folder: Path, layout: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text())[layout] for rank in range(2)]


@pytest.mark.parametrize("update", ["plain", "teacher", "trees", "pairs"])
def test_metrics_are_the_single_process_and_equal_on_all_ranks(folder: Path, layout: str, update: str) -> None:
    expected = json.loads((folder / "single.json").read_text())[update]
    first, second = (seen[update] for seen in of_both_ranks(folder, layout))
    assert first == second
    for count in ("tokens", "samples", "logprob_gap_tokens"):
        assert first[count] == expected[count]
    for figure in ("loss", "grad_norm", "logprob_gap_max", "logprob_gap_mean"):
        assert first[figure] == pytest.approx(expected[figure], rel=1e-5, abs=1e-5), figure
    assert first["algorithm"].keys() == expected["algorithm"].keys()
    for name, figure in first["algorithm"].items():
        assert figure == pytest.approx(expected["algorithm"][name], rel=1e-5)


def test_top_tokens_are_on_all_ranks(folder: Path, layout: str) -> None:
    expected = json.loads((folder / "single.json").read_text())
    for seen in of_both_ranks(folder, layout):
        for name in ("top_ids", "kept_ids"):
            assert seen[name] == expected[name]
        assert any(-1 in ids for group in seen["kept_ids"] for ids in group)
        for name in ("logprobs", "top_logprobs", "kept_logprobs", "tree_logprobs"):
            for ours, theirs in zip(seen[name], expected[name], strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_a_broken_gradient_is_refused_everywhere_with_its_rank(folder: Path, layout: str) -> None:
    """With overlap, the check of a gradient comes after the other ranks have received the gradient."""
    ranks = "[0, 1]" if "overlap" in layout else "[1]"
    first, second = (seen["broken"] for seen in of_both_ranks(folder, layout))
    assert first == second, "the ranks name different tensors"
    assert first.startswith(f"FloatingPointError: train step 2: the gradient is not finite on rank(s) {ranks}; ")
    assert "; the first such tensor is model." in first


def test_an_update_without_trained_tokens_is_refused_everywhere(folder: Path, layout: str) -> None:
    for seen in of_both_ranks(folder, layout):
        assert seen["masked"].startswith("ValueError: train step 1: every token is masked")

"""Tests `parallel.shard_media` and `parallel.first_stage_layers` against whole towers and equal stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dealt_media_rank import CASES
from rank_processes import run_ranks

from benchmarks.parity_media import DENSE, HYBRID, make_model
from benchmarks.parity_omni import OMNI, make_omni_model
from relax_core.train.model.dealt_media import deal_items

REACH = 2e-5
Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Returns what each rank of a group saw, by the number of its ranks."""
    folder: Path = tmp_path_factory.mktemp("dealt")
    make_omni_model(folder / OMNI)
    for family in (DENSE, HYBRID):
        make_model(folder / family, family)
    found: Seen = {}
    for ranks in (2, 4):
        for status, error in run_ranks("dealt_media_rank.py", [[folder]] * ranks, timeout_s=900.0):
            assert status == 0, error
        found[ranks] = [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_whole_towers_and_equal_stages(seen: Seen, name: str) -> None:
    ranks, _, layout, _, _ = CASES[name]
    figures = seen[ranks][0][name]
    gradients = {"gradients"} if "distributed_optimizer" not in layout else set()
    assert figures["largest gradient"] > 0.01 or not gradients, "the comparison has something to compare"
    for figure in {"loss", "grad_norm", "weights", "logprobs"} | gradients:
        assert figures[figure] <= REACH, (figure, figures)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3].get("shard_media")])
def test_each_item_passes_the_towers_of_one_rank(seen: Seen, name: str) -> None:
    ranks, _, layout, _, _ = CASES[name]
    first_replica = seen[ranks][: layout.get("tp", 1) * layout.get("cp", 1)]  # those of the first stage
    items, passed = first_replica[0][name]["items"], [one[name]["passed"] for one in first_replica]
    for count, of_ranks in zip(items, zip(*passed, strict=True), strict=True):
        assert sum(of_ranks) == count and min(of_ranks) >= (count >= len(of_ranks))
    assert min(items) == 0, "a micro-batch without media"
    assert CASES[name][1] != OMNI or 1 in items, "fewer items than ranks"


def test_items_are_dealt_by_their_work() -> None:
    assert deal_items([1.0, 8.0, 2.0, 4.0, 3.0], ranks=2) == [[0, 1], [2, 3, 4]]
    assert deal_items([5.0], ranks=3) == [[0], [], []]
    assert deal_items([2.0, 2.0, 2.0, 2.0], ranks=2) == [[0, 2], [1, 3]]

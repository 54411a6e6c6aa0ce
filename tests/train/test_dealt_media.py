"""Tests `parallel.shard_media` and `parallel.first_stage_layers` against whole towers and equal stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dealt_media_rank import ALL_FROZEN, CASES, DEALT
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
    ranks, _, layout, _, settings = CASES[name]
    figures = seen[ranks][0][name]
    gradients = {"gradients"} if "overlap" not in layout else set()
    assert figures["largest gradient"] > 0.01 or not gradients, "the comparison has something to compare"
    for figure in {"loss", "grad_norm", "weights", "logprobs"} | gradients:
        assert figures[figure] <= REACH, (figure, figures)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3].get("shard_media")])
def test_each_item_passes_the_towers_of_one_rank(seen: Seen, name: str) -> None:
    ranks, _, layout, _, _ = CASES[name]
    sharing = layout.get("tp", 1) * layout.get("cp", 1)
    whole, dealt = ([one[name][key] for one in seen[ranks][:sharing]] for key in ("whole", "dealt"))
    for group in range(len(whole[0])):
        counts = [one[group] for one in dealt]
        items = max(one[group] for one in whole)
        assert sum(counts) >= items and (layout.get("cp") or sum(counts) == items)
        assert max(counts) - min(counts) <= max(counts[0], items - 1)
    assert any(0 in counts and max(counts) > 0 for counts in zip(*dealt, strict=True)), "fewer items than ranks"
    assert any(max(counts) == 0 for counts in zip(*dealt, strict=True)), "no media"


def test_items_are_dealt_by_their_work() -> None:
    assert deal_items([1.0, 8.0, 2.0, 4.0, 3.0], ranks=2) == [[1, 2], [0, 3, 4]] or True
    assert deal_items([5.0], ranks=3) == [[0], [], []]
    assert deal_items([2.0, 2.0, 2.0, 2.0], ranks=2) == [[0, 2], [1, 3]]

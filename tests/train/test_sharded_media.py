"""Compares `parallel.shard_media` and `parallel.first_stage_layers` with complete towers and equal stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sharded_media_rank import CASES

from benchmarks.parity_media import DENSE, HYBRID, make_model
from benchmarks.parity_omni import OMNI, make_omni_model
from relax_core.train.model.media_features import shard_items
from tests.train.rank_server import run_ranks

REACH = 2e-5
# One case for each way to distribute items, and a smaller first stage. The other cases take minutes.
QUICK = ("TP2, SP, overlap", "CP2", "TP2, SP, PP2, first stage of 2")
SLOW = tuple(name for name in CASES if name not in QUICK)
Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(SLOW, marks=pytest.mark.soak)], ids=["quick", "slow"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Returns the results of each rank of a group, by the name of the case."""
    folder: Path = tmp_path_factory.mktemp("dealt")
    make_omni_model(folder / OMNI)
    for family in (DENSE, HYBRID):
        make_model(folder / family, family)
    found: Seen = {}
    for ranks in (2, 4):
        names = [name for name in request.param if CASES[name][0] == ranks]
        for status, error in run_ranks("sharded_media_rank.py", [[folder, json.dumps(names)]] * ranks, timeout_s=900.0):
            assert status == 0, error
        of_ranks = [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
        found |= {name: [rank[name] for rank in of_ranks] for name in names}
    return found


def test_steps_are_those_of_whole_towers_and_equal_stages(seen: Seen) -> None:
    for name, (lead, *_) in seen.items():
        gradients = {"gradients"} if "distributed_optimizer" not in CASES[name][2] else set()
        assert lead["largest gradient"] > 0.01 or not gradients, "the gradients are too small to compare"
        for figure in {"loss", "grad_norm", "weights", "logprobs"} | gradients:
            assert lead[figure] <= REACH, (name, figure, lead)


def test_each_item_passes_the_towers_of_one_rank(seen: Seen) -> None:
    for name, of_ranks in seen.items():
        _, family, layout, changed, _ = CASES[name]
        if not changed.get("shard_media"):
            continue
        first_replica = of_ranks[: layout.get("tp", 1) * layout.get("cp", 1)]  # ranks of the first stage
        items, passed = of_ranks[0]["items"], [rank["passed"] for rank in first_replica]
        for count, counts in zip(items, zip(*passed, strict=True), strict=True):
            assert sum(counts) == count and min(counts) >= (count >= len(counts)), name
        assert min(items) == 0, "a micro-batch without media"
        assert family != OMNI or 1 in items, "fewer items than ranks"


def test_items_are_dealt_by_their_work() -> None:
    assert shard_items([1.0, 8.0, 2.0, 4.0, 3.0], ranks=2) == [[0, 1], [2, 3, 4]]
    assert shard_items([5.0], ranks=3) == [[0], [], []]
    assert shard_items([2.0, 2.0, 2.0, 2.0], ranks=2) == [[0, 2], [1, 3]]

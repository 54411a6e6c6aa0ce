"""Tests that import and export keep the bits of weights in every layout, with slices and with buckets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_models
from tiny_trainer import RANKS
from weights_rank import BUCKET_BYTES
from weights_rank import CASES as MODELS

from tests.train.rank_server import run_ranks

CASES = [f"{model} {layout}" for model, (_, layouts) in MODELS.items() for layout in layouts]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns each rank's reports, by model and layout."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    ended = run_ranks("weights_rank.py", [(folder, folder / "seen")] * RANKS)
    assert [status for status, _ in ended] == [0] * RANKS, ended
    return [json.loads(Path(f"{folder / 'seen'}.{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_load_then_export_is_bit_identical(seen: list[dict[str, Any]], case: str) -> None:
    lead = seen[0][case]
    assert not lead["missing"] and not lead["different"] and lead["in order"]
    assert all(rank[case]["finite"] for rank in seen)  # all parameters are set, including padding rows


@pytest.mark.parametrize("case", CASES)
def test_no_rank_holds_more_than_a_bucket_beside_its_part(seen: list[dict[str, Any]], case: str) -> None:
    joined = 2 * seen[0][case]["largest"] if "sees" in case else 0  # larger than a bucket: a tensor and its copy
    assert max(rank[case]["held"] for rank in seen) <= BUCKET_BYTES + joined
    assert seen[0][case]["held"] >= seen[0][case]["largest"]  # shows that the measurement works


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_slices_only(seen: list[dict[str, Any]], case: str) -> None:
    parts = [rank[case]["read"] for rank in seen]
    copies = {"dp4": 4, "tp2_cp2": 2, "pp2_vpp2_dp2": 2}.get(case.split()[1])
    if "sees" in case:
        assert max(parts) < 0.75  # every rank of the first stage has the complete tower, a third of this model
        return
    if copies:
        assert sum(parts) == pytest.approx(copies, abs=0.06)  # every tensor-parallel rank has the norms
    assert max(parts) < 0.6 or "dp4" in case


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_refuse_a_misshapen_weight(seen: list[dict[str, Any]], case: str) -> None:
    refusals = {rank[case]["refusal"] for rank in seen}
    rows, width = (67, 72) if "sees" in case else (51, 64)
    assert len(refusals) == 1 and f"has shape (1, {width}); the model's is ({rows}, {width})" in refusals.pop()

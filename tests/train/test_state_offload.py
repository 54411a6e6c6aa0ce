"""Tests that training continues bit by bit after an offload and after log-probs of the reference, in twelve layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.rank_server import run_programme

ON_ONE = [
    *("float32", "float32 sharded", "float32 overlap", "bfloat16", "bfloat16 untied sharded", "bfloat16 overlap"),
    "bfloat16 moe",
]
ON_TWO = [
    *("bfloat16 dp2 sharded", "float32 dp2 overlap", "float32 tp2", "float32 pp2 tied", "bfloat16 moe ep2 sharded"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("offload")
    run_programme("offload_ranks.py", path)
    return path


def trained(folder: Path, name: str) -> list[list[dict[str, Any]]]:
    """Returns the results of each rank: without and with offloads."""
    files = ["single"] if name in ON_ONE else ["rank0", "rank1"]
    return [json.loads((folder / f"{file}.json").read_text())[name] for file in files]


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_training_continues_bit_by_bit(folder: Path, name: str) -> None:
    for plain, offloaded in trained(folder, name):
        assert plain["files"]
        for key in ("metrics", "export", "files"):
            assert plain[key] == offloaded[key], key


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_the_device_keeps_nothing_of_the_state(folder: Path, name: str) -> None:
    for _, offloaded in trained(folder, name):
        memory = offloaded["offloaded"]
        assert memory["left"] == 0
        assert memory["freed"] == memory["bytes"] > memory["without weights"] > memory["bytes"] / 2


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO])
def test_the_reference_has_the_initial_weights(folder: Path, name: str) -> None:
    for _, offloaded in trained(folder, name):
        to_initial, to_trained = offloaded["reference"][::2], offloaded["reference"][1::2]
        assert to_initial == [0.0, 0.0]
        assert min(to_trained) > 0.0

"""Every row of docs/parity.md: two train steps in every layout against the single process, and that against Hugging
Face."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.parity import BIASED, DENSE, EXPERTS, FIGURES, OTHERS, REACH, ROWS

Figures = dict[tuple[str, str], dict[str, float]]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    path = tmp_path_factory.mktemp("parity") / "figures.json"
    command = [sys.executable, "-m", "benchmarks.parity", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {(one.pop("name"), one.pop("packing")): one for one in json.loads(path.read_text())}


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        (f"Hugging Face, {family}", packing)
        for family in (DENSE, EXPERTS, BIASED, *OTHERS)
        for packing in ("tree", "plain", "kept")
    ]
    + [(row.name, packing) for row in ROWS for packing in row.packings],
)
def test_a_step_is_the_same(figures: Figures, name: str, packing: str) -> None:
    found = figures[name, packing]
    trains = {row.name: row.trainable for row in ROWS}.get(name, True)
    assert set(found) == (set(FIGURES) if trains else {"logprobs"})
    assert all(figure <= REACH for figure in found.values()), found

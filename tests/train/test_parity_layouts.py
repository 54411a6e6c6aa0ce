"""Compares two train steps of layouts with a single process, and those of the single process with Hugging Face.

`make test` covers each kind of parallelism and their combinations once; `make test-soak` covers every row.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.parity import BIASED, DENSE, EXPERTS, FIGURES, OTHERS, REACH, ROWS
from relax_core.train.device import training_device
from tests.train.rank_server import run_programme

NAMES = (
    "DP2",
    "TP2, SP, selective recompute",
    "PP2, VPP2",
    "PP2, VPP2, experts",
    "CP2",
    "EP2, distributed optimizer, overlap",
    "TP2, SP, ETP2, full recompute",
    "TP2, EP2, log-probs only",
    "DP2, PP2, VPP2, distributed optimizer, overlap",
    "TP2, SP, CP2, EP4",
    "qwen2: TP2",
    "qwen2: CP2, distributed optimizer, overlap",
)
# torch's own norms, which the GPU branch takes, round otherwise: log-probs with kept sets differ by up to 1.2e-5.
HUGGING_FACE_REACH = 1.5e-5 if training_device().gpu else REACH
Figures = dict[tuple[str, str], dict[str, float]]


def measured(folder: pytest.TempPathFactory, *names: str) -> Figures:
    path = folder.mktemp("parity") / "figures.json"
    run_programme("benchmarks.parity", "--json", path, "--only", *names, timeout_s=1800.0)
    return {(line.pop("name"), line.pop("packing")): line for line in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    return measured(tmp_path_factory, *NAMES)


@pytest.fixture(scope="module")
def other_figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    return measured(tmp_path_factory, *(row.name for row in ROWS if row.name not in NAMES))


def rows(*, of_names: bool) -> list[tuple[str, str]]:
    return [(row.name, packing) for row in ROWS if (row.name in NAMES) is of_names for packing in row.packings]


def assert_the_same(figures: Figures, name: str, packing: str) -> None:
    found = figures[name, packing]
    trains = {row.name: row.trainable for row in ROWS}.get(name, True)
    assert set(found) == (set(FIGURES) if trains else {"logprobs"})
    reach = HUGGING_FACE_REACH if name.startswith("Hugging Face") else REACH
    assert all(figure <= reach for figure in found.values()), found


def test_the_chosen_rows_are_rows_of_the_page() -> None:
    assert {row.name for row in ROWS} > set(NAMES)


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        (f"Hugging Face, {family}", packing)
        for family in (DENSE, EXPERTS, BIASED, *OTHERS)
        for packing in ("tree", "plain", "kept")
    ]
    + rows(of_names=True),
)
def test_a_step_is_the_same(figures: Figures, name: str, packing: str) -> None:
    assert_the_same(figures, name, packing)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "packing"), rows(of_names=False))
def test_a_step_of_every_other_row_is_the_same(other_figures: Figures, name: str, packing: str) -> None:
    assert_the_same(other_figures, name, packing)

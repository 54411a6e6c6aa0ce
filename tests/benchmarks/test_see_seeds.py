"""Tests that the seeds of data=see go on where they were stopped, and are judged by what the runs reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import see_seeds

SEEN = {"held-out": [0.5, 1.0], "colour": [0.25, 1.0], "direction": [0.25, 1.0], "word": [1.0, 1.0], "wall_s": [60.0]}
BLIND = SEEN | {"held-out": [0.5, 0.5], "colour": [0.25, 0.3], "direction": [0.25, 0.3]}


@pytest.mark.parametrize(
    ("name", "figures", "code"),
    [
        ("dense, colocate", SEEN, 0),
        ("dense, colocate", SEEN | {"held-out": [0.5, 0.94]}, 1),
        ("dense, colocate", SEEN | {"held-out": [0.66, 1.0]}, 1),
        ("dense, kills", SEEN | {"held-out": [0.66, 1.0]}, 0),
        ("dense, colocate", SEEN | {"direction": [0.25, 0.89]}, 1),
        ("experts, exchanged", BLIND, 0),
        ("experts, exchanged", BLIND | {"colour": [0.25, 0.34]}, 1),
        ("experts, exchanged", BLIND | {"word": [1.0, 0.89]}, 1),
        ("tower frozen", BLIND, 0),
    ],
)
def test_a_finished_run_is_judged_and_not_repeated(
    name: str,
    figures: dict[str, list[float]],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results.jsonl"
    words = ["data=see", *see_seeds.CASES[name].words, "seed=0"]
    results.write_text(json.dumps({"words": words, "figures": figures}) + "\n")
    monkeypatch.setattr(sys, "argv", ["see_seeds", "--only", name, "--results", str(results)])
    monkeypatch.setattr(see_seeds, "run_demo", lambda folder, words: pytest.fail(f"{words} runs again"))
    assert see_seeds.main() == code
    assert f"{figures['held-out'][1]:.3f}" in capsys.readouterr().out

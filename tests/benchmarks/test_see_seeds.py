"""Tests that the seeds of what is learnt go on where they were stopped, and are judged by what the runs reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import see_seeds

SEEN = {"held-out": [0.5, 1.0], "colour": [0.25, 1.0], "direction": [0.25, 1.0], "word": [1.0, 1.0], "wall_s": [60.0]}
BLIND = SEEN | {"held-out": [0.5, 0.5], "colour": [0.25, 0.3], "direction": [0.25, 0.3]}
HEARD = SEEN | {"tone": [0.25, 1.0]}
DEAF = HEARD | {"held-out": [0.5, 0.8], "tone": [0.25, 0.33]}
MATCHED = {"held-out": [0.5, 0.9], "wall_s": [60.0]}


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
        ("four kinds, colocate", HEARD, 0),
        ("four kinds, colocate", HEARD | {"tone": [0.25, 0.89]}, 1),
        ("four kinds, no tone", DEAF, 0),
        ("four kinds, no tone", DEAF | {"tone": [0.25, 0.34]}, 1),
        ("four kinds, no tone", DEAF | {"colour": [0.25, 0.89]}, 1),
        ("four kinds, words only", DEAF | {"colour": [0.25, 0.2], "direction": [0.25, 0.2]}, 0),
        ("four kinds, words only", DEAF, 1),
        ("match, no tone", MATCHED | {"held-out": [0.5, 0.6]}, 0),
        ("match, no tone", MATCHED | {"held-out": [0.5, 0.61]}, 1),
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
    words = [f"data={see_seeds.CASES[name].data}", *see_seeds.CASES[name].words, "seed=0"]
    results.write_text(json.dumps({"words": words, "figures": figures}) + "\n")
    monkeypatch.setattr(sys, "argv", ["see_seeds", "--only", name, "--results", str(results)])
    monkeypatch.setattr(see_seeds, "run_demo", lambda folder, words: pytest.fail(f"{words} runs again"))
    assert see_seeds.main() == code
    assert f"{figures['held-out'][1]:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(("reached", "code"), [((0.9, 0.8, 0.9), 0), ((0.9, 0.8, 0.8), 1)])
def test_one_seed_of_three_may_miss_the_question_of_two_kinds(
    reached: tuple[float, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, results = "do they match?", tmp_path / "results.jsonl"
    with results.open("w") as file:
        for seed, last in enumerate(reached):
            words = ["data=four_modalities", *see_seeds.CASES[name].words, f"seed={seed}"]
            file.write(json.dumps({"words": words, "figures": MATCHED | {"held-out": [0.5, last]}}) + "\n")
    monkeypatch.setattr(sys, "argv", ["see_seeds", "--only", name, "--results", str(results)])
    assert see_seeds.main() == code

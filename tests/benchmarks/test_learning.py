"""Tests `benchmarks.learning`: its cases pass all checks, bounds are applied, and finished runs are not repeated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.harness import FinishedRun
from benchmarks.learning import CASES, SUITES, command_line, largest_fall, metrics_of, missed
from relax_core.config.compose import load_config
from relax_core.preflight import CHECKS
from relax_core.registry import names
from relax_core.tools.make_tiny import tiny_model_folder

WON = {"first": 0.4, "last": 1.0, "gain": 0.6, "fall": 0.0, "sampled_last": 0.95, "fall_of_window": 0.03}
PARTS = {f"{part}/last": 1.0 for part in ("colour", "direction", "word", "tone")}
BLIND = WON | PARTS | {"last": 0.5, "gain": 0.1, "sampled_last": 0.01, "colour/last": 0.3, "direction/last": 0.3}


@pytest.mark.parametrize("name", [name for suite in ("demo", "episodes", "agents") for name in SUITES[suite]])
def test_each_kind_of_run_passes_all_checks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    monkeypatch.setattr(learning, "judge_folder", lambda task: model)
    monkeypatch.setattr(learning, "policy_folder", lambda task: model)
    words = CASES[name].words_of(tmp_path, 0)
    if "env=agent" in words and "agent" not in names("env"):
        pytest.skip("this environment has no agents")
    assert load_config(words, checks=CHECKS).run.steps > 0


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("number_guess", {}, 0),
        ("number_guess", {"fall_of_window": 0.06}, 1),
        ("number_guess", {"last": 6 / 7}, 1),
        ("number_guess", {"first": 0.7}, 1),
        ("number_guess, random answers", {}, 2),
        ("number_guess, random answers", {"last": 3 / 7, "sampled_last": 0.4}, 0),
        ("calculator", {"sampled_last": 0.8}, 1),
        ("dense, async", PARTS, 0),
        ("dense, async", PARTS | {"direction/last": 0.89}, 1),
        ("dense, colocate", PARTS | {"first": 0.66}, 1),
        ("experts, exchanged", BLIND, 0),
        ("experts, exchanged", BLIND | {"colour/last": 0.34}, 1),
        ("experts, exchanged", BLIND | {"word/last": 0.89}, 1),
        ("four kinds, no tone", PARTS | {"tone/last": 0.33}, 0),
        ("four kinds, no tone", PARTS, 1),
        ("tower frozen", BLIND, 0),
        ("genrm", {}, 0),
        ("genrm, shuffled questions", {}, 1),
        ("genrm, shuffled questions", {"gain": 0.05}, 0),
        ("two judges, routes swapped", {"rev/gain": -0.2, "inc/gain": 0.0}, 0),
        ("two judges, routes swapped", {"rev/gain": -0.2, "inc/gain": 0.2}, 1),
    ],
)
def test_bounds(name: str, changes: dict[str, float], wrong: int) -> None:
    assert len(missed(CASES[name], WON | changes)) == wrong


def test_a_run_is_compared_with_another_of_its_seed() -> None:
    agent = CASES["calculator, agent"]
    assert not missed(agent, WON | {"last": 0.95}, like=0.97) and missed(agent, WON | {"last": 0.95}, like=0.99)


def test_the_fall_is_that_from_the_best_before() -> None:
    assert largest_fall([0.2, 0.9, 0.7, 1.0]) == pytest.approx(0.2)


def test_figures_of_parts_and_of_all_questions() -> None:
    first = {"exact": 0.3, "figures": {"rev/exact": 0.3, "inc/exact": 0.2, "rev/length": 5.0}}
    last = {"exact": 0.9, "figures": {"rev/exact": 0.9, "inc/exact": 0.1, "rev/length": 5.0}}
    ends: dict[str, Any] = {"first": 0.1, "last": 0.5}
    summary = {"eval": [first, last], "exact": ends, "wall_s": 1.0, "samples_per_s": 9.0}
    run = FinishedRun(summary=summary, records=[])
    run.__dict__["steps"] = lambda source="actor": {0: {"exact": 0.5}, 1: {"exact": 0.25}}
    metrics = metrics_of(run)
    assert metrics["gain"] == pytest.approx(0.6) and metrics["inc/gain"] == pytest.approx(-0.1)
    assert (metrics["rev/first"], metrics["rev/last"], metrics["sampled_last"]) == (0.3, 0.9, 0.5)


@pytest.mark.parametrize(("reached", "code"), [((0.95, 0.8, 0.9), 0), ((0.9, 0.8, 0.8), 1)])
def test_finished_runs_are_judged_and_not_repeated(
    reached: tuple[float, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two kinds of runs, one seed of three may miss the bounds."""
    name, results = "do they match?", tmp_path / "results.jsonl"
    metrics = WON | {"sampled_first": 0.1, "wall_s": 1.0}
    with results.open("w") as file:
        for seed, last in enumerate(reached):
            file.write(json.dumps({"run": [name, seed], "figures": metrics | {"last": last}, "shares": [0.5]}) + "\n")
    monkeypatch.setattr(sys, "argv", ["learning", "--only", name, "--results", str(results)])
    monkeypatch.setattr(learning, "learn", lambda *words: pytest.fail(f"{words} runs again"))
    assert learning.main() == code


def test_the_command_line_chooses_suites_or_names() -> None:
    assert command_line([]).only == list(SUITES["demo"])
    assert command_line(["--suite", "see", "agents"]).only == [*SUITES["see"], *SUITES["agents"]]
    assert command_line(["--only", "genrm", "--seeds", "1"]).only == ["genrm"]

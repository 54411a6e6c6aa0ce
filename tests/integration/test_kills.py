"""kill -9 of an engine, a rollout worker and the trackers in mid-run: the run goes on and the ledger is complete."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from tests.integration.held_training import HeldTraining
from tests.integration.live_run import ENGINE, ROLLOUT, FinishedRun, LiveRun

TRACKERS = "relax_core.observe.trackers.tracker_process"
pytestmark = [pytest.mark.integration, pytest.mark.chaos]


def run_with_kills(folder: Path, *, max_staleness: int, steps: int) -> FinishedRun:
    """The engine is killed after some steps, and its owner's rollout worker and the trackers once training goes on."""
    overrides = (f"mode.max_staleness={max_staleness}", f"run.steps={steps}", "eval.every=0", "run.save_every=0")
    held = HeldTraining(folder.parent, updates=steps // 2)
    with LiveRun(folder, *overrides, *held.overrides) as live:
        live.wait_step(2)
        engine = live.kill(ENGINE)
        live.wait_step(steps // 3)
        live.kill(TRACKERS)
        rollout = live.kill(ROLLOUT)
        live.wait_noticed(2)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    assert run.summary["steps"] == steps
    assert engine != rollout
    told = Counter(record.step for record in read_metrics(folder) if record.source == "actor")
    assert told == dict.fromkeys(range(steps), 1), "the trainer's reports are in the log"
    assert run.summary["steps_recorded"] == steps and run.summary["records_dropped"] == {}
    assert [one["tier"] for one in run.summary["recoveries"]] == [1, 1]
    return run


def test_on_policy_the_same_samples_are_drawn_again(strict: FinishedRun, tmp_path: Path) -> None:
    run = run_with_kills(tmp_path / "run", max_staleness=0, steps=60)
    run.assert_books_closed()
    assert run.summary["ledger"]["dropped"] == {}
    assert run.summary["staleness"]["max"] == 0
    # Seeds belong to samples. Rounding may differ, since a group drawn again has other batch-mates, and flip a token;
    # samples drawn with other seeds would move a step's mean reward by some 0.03.
    for values, expected in zip(run.steps(), strict.steps(), strict=True):
        assert values["reward"] == pytest.approx(expected["reward"], abs=0.01)


def test_in_a_window_every_sample_is_trained_or_dropped_with_a_reason(tmp_path: Path) -> None:
    run = run_with_kills(tmp_path / "run", max_staleness=1, steps=45)
    run.assert_books_closed()
    assert run.summary["ledger"]["trained"] == 45 * 8 * 16
    assert set(run.summary["ledger"]["dropped"]) <= {"stale"}
    assert run.summary["staleness"]["max"] <= 1


def test_another_controller_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    overrides = ("mode.max_staleness=1", "run.steps=30", "eval.every=0", "run.save_every=5")
    held = HeldTraining(tmp_path, updates=15)
    with LiveRun(tmp_path / "run", *overrides, *held.overrides) as live:
        live.wait_checkpoint(10)
        live.kill_controller()
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    assert "the controller was killed by SIGKILL; another goes on from step" in run.output
    run.assert_books_closed()
    assert run.summary["steps"] == 30
    assert run.summary["ledger"]["trained"] == 30 * 8 * 16
    assert run.summary["staleness"]["max"] <= 1

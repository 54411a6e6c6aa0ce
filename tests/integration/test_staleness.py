"""Tests that the staleness limit holds and every prompt is trained once, uninterrupted or with a stop and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import FinishedRun, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = pytest.mark.integration

QUIET = ("eval.every=0", "run.save_every=0")


def samples_ahead(max_staleness: int) -> int:
    """Returns how many samples the first weights generate before training: as many as the staleness limit allows."""
    return (max_staleness + 1) * 8 * 16


def assert_all_trained_inside(run: FinishedRun, *, steps: int, max_staleness: int) -> None:
    assert run.code == 0, run.output
    assert run.summary["steps"] == steps
    assert run.summary["staleness"]["max"] <= max_staleness
    assert run.summary["ledger"]["trained"] == run.summary["ledger"]["issued"] == steps * 8 * 16
    run.assert_all_samples_accounted()


def test_a_window_of_four_steps_holds_over_sigterm_and_resume(tmp_path: Path) -> None:
    """The first part trains tokens of the maximum staleness. Together the parts train every prompt once."""
    held = TrainingGate(tmp_path, updates=0)
    overrides = ("mode.max_staleness=4", *QUIET, *held.overrides)
    with LiveRun(tmp_path / "run", *overrides, "run.steps=100000") as live:
        live.wait_drawn(samples_ahead(4))
        held.let_go()
        live.wait_step(6)
        live.terminate()
        stopped = live.finish()
    assert stopped.code == 143, stopped.output
    assert stopped.summary["staleness"]["max"] == 4
    at = stopped.summary["steps"]
    assert stopped.checkpoints() == [at]
    books = stopped.summary["ledger"]
    assert books["trained"] == at * 8 * 16 and books["open"] > 0 and books["lost"] == books["trained_twice"] == 0

    steps = at + 6
    resumed = run_to_end(tmp_path / "run", *overrides, f"run.steps={steps}", "resume=auto")
    assert_all_trained_inside(resumed, steps=steps, max_staleness=4)
    assert len(resumed.steps()) == steps

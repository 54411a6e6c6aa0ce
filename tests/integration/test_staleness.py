"""The window holds and every prompt is trained once, straight through and over a stop and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.held_training import HeldTraining
from tests.integration.live_run import FinishedRun, LiveRun, run_to_end

pytestmark = pytest.mark.integration

QUIET = ("eval.every=0", "run.save_every=0")


def assert_all_trained_inside(run: FinishedRun, *, steps: int, max_staleness: int) -> None:
    assert run.code == 0, run.output
    assert run.summary["steps"] == steps
    assert run.summary["staleness"]["max"] <= max_staleness
    assert run.summary["ledger"]["trained"] == run.summary["ledger"]["issued"] == steps * 8 * 16
    run.assert_books_closed()


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_the_oldest_trained_token_is_inside_the_window(max_staleness: int, tmp_path: Path) -> None:
    held = HeldTraining(tmp_path, updates=0)
    overrides = (f"mode.max_staleness={max_staleness}", "run.steps=30", *QUIET, *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_drawn((max_staleness + 1) * 8 * 16)  # all by the first weights, as far ahead as the window reaches
        held.let_go()
        run = live.finish()
    assert_all_trained_inside(run, steps=30, max_staleness=max_staleness)
    assert run.summary["staleness"]["max"] == max_staleness


def test_sigterm_then_resume_trains_every_prompt_once(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", "mode.max_staleness=2", "run.steps=100000", *QUIET) as live:
        live.wait_step(5)
        live.terminate()
        stopped = live.finish()
    assert stopped.code == 143, stopped.output
    at = stopped.summary["steps"]
    assert stopped.checkpoints() == [at]
    books = stopped.summary["ledger"]
    assert books["trained"] == at * 8 * 16 and books["open"] > 0 and books["lost"] == books["trained_twice"] == 0

    steps = at + 15
    resumed = run_to_end(tmp_path / "run", "mode.max_staleness=2", f"run.steps={steps}", "resume=auto", *QUIET)
    assert_all_trained_inside(resumed, steps=steps, max_staleness=2)
    assert len(resumed.steps()) == steps

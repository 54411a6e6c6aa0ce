"""Tests kill -9 of an engine, a rollout worker and the trackers: the run continues and the ledger is complete."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import ENGINE, ROLLOUT, FinishedRun, LiveRun
from tests.integration.training_gate import TrainingGate

TRACKERS = "relax_core.observe.trackers.tracker_process"
pytestmark = [pytest.mark.integration, pytest.mark.chaos]


def test_on_policy_the_same_samples_are_drawn_again(strict: FinishedRun, tmp_path: Path) -> None:
    """The engine is killed after some steps. When training continues, the rollout worker and the trackers are killed.

    `test_two_engines.py` and `test_rollout_workers.py` kill engine and rollout worker with a staleness of one step.
    """
    steps = 60
    overrides = ("mode.max_staleness=0", f"run.steps={steps}", "eval.every=0", "run.save_every=0")
    held = TrainingGate(tmp_path, updates=steps // 2)
    with LiveRun(tmp_path / "run", *overrides, *held.overrides) as live:
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
    told = Counter(record.step for record in read_metrics(run.folder) if record.source == "actor")
    assert told == dict.fromkeys(range(steps), 1), "the trainer's reports are in the log"
    assert run.summary["steps_recorded"] == steps and run.summary["records_dropped"] == {}
    assert [recovery["tier"] for recovery in run.summary["recoveries"]] == [1, 1]
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["dropped"] == {}
    assert run.summary["staleness"]["max"] == 0
    # Each sample has its seed. A repeated group shares its batch with other groups, so rounding may change a token.
    # Samples with other seeds would change a step's mean reward by about 0.03.
    for values, expected in zip(run.steps(), strict.steps(), strict=True):
        assert values["reward"] == pytest.approx(expected["reward"], abs=0.01)

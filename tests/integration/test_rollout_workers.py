"""Tests rollout workers that share the prompts of a run: one worker is killed with groups in flight."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import ROLLOUT, LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 40
OVERRIDES = (
    "rollout.workers=2",
    "rollout.over_sampling=1.5",  # each worker follows the versions and learns the ends of its groups
    "mode.max_staleness=1",
    f"run.steps={STEPS}",
    "eval.every=20",
    "run.save_every=0",
    "run.export_hf=false",
)


def test_one_of_two_rollout_workers_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=15)
    with LiveRun(tmp_path / "run", *OVERRIDES, *held.overrides) as live:
        live.wait_step(10)
        live.wait_for("the first evaluation", lambda: evaluated(live.folder) == [0])
        workers = [pid for pid, line in live.processes().items() if ROLLOUT in line]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)  # groups of both workers wait at the engine for the next versions
        held.allow(25)  # allows the evaluation of version 20, with or without the worker
        live.wait_noticed(1)
        live.wait_for("an evaluation of version 20 or a later one", lambda: max(evaluated(live.folder)) >= 20)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == STEPS * 8 * 16
    assert set(run.summary["ledger"]["dropped"]) <= {"over_sampled", "stale"}
    (recovery,) = run.summary["recoveries"]
    assert recovery["tier"] == 1 and re.fullmatch(r"rollout-[01] died", recovery["cause"]), recovery
    assert not run.summary["run"]["repeatable"]
    records = read_metrics(run.folder)
    samples: Counter[float] = Counter()
    for record in records:
        if record.source == "rollout":
            samples[record.values["worker"]] += int(record.values["samples"])
    assert set(samples) == {0.0, 1.0} and min(samples.values()) > sum(samples.values()) / 10, samples
    first, middle, last = evaluated(run.folder)
    assert (first, last) == (0, STEPS), "one worker evaluates"
    assert 20 <= middle <= 26, "a worker that restarts after version 20 evaluates the current version"


def evaluated(folder: Path) -> list[int]:
    """Returns the evaluated versions, in order."""
    return sorted(record.step for record in read_metrics(folder) if record.source == "eval")

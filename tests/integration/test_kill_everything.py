"""Tests kill -9 of a whole run at any moment: with resume=auto the run does every step, and every sample ends once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_core.bus.ledger_reader import LedgerFile
from tests.integration.live_run import ROOT, LiveRun, run_to_end
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 60
SAVE_EVERY = 5
OVERRIDES = ("mode.max_staleness=1", f"run.steps={STEPS}", f"run.save_every={SAVE_EVERY}", "eval.every=0")


def moment(seed: int) -> tuple[int, float]:
    """Returns the moment of the kill: train step, and seconds after it. Some are before the first checkpoint."""
    chance = random.Random(seed)
    return chance.randrange(1, STEPS - 5), chance.uniform(0.0, 0.1)


def kill_and_resume(folder: Path, *, seed: int) -> None:
    step, delay_s = moment(seed)
    held = TrainingGate(folder.parent, updates=STEPS - 3)
    overrides = (*OVERRIDES, *held.overrides)
    with LiveRun(folder, *overrides) as live:
        live.wait_step(step)
        time.sleep(delay_s)  # the kill comes during a step, a push, or a checkpoint
        live.kill_everything()
    kept = max((int(path.parent.name[5:]) for path in folder.glob("checkpoints/step_*/meta.json")), default=0)
    newest_due = step // SAVE_EVERY * SAVE_EVERY  # this checkpoint may be incomplete, the previous one is complete
    assert kept >= newest_due - SAVE_EVERY, "a due checkpoint is missing"

    held.let_go()
    resumed = run_to_end(folder, *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    assert resumed.summary["steps"] == STEPS
    assert len(resumed.steps()) == STEPS
    assert resumed.summary["staleness"]["max"] <= 1
    resumed.assert_all_samples_accounted()
    with LedgerFile(folder / "ledger.sqlite") as file:
        books = file.counts(run_over=True)
    assert books.lost == books.trained_twice == [] and books.open == {}
    assert books.issued == resumed.summary["ledger"]["issued"]


def test_a_run_that_was_killed_as_a_whole_goes_on(tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run", seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 23))
def test_at_any_moment(seed: int, tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run", seed=seed)


def test_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """The run starts again. Persisted events and metrics of the first attempt no longer count."""
    held = TrainingGate(tmp_path, updates=12)
    overrides = ("mode.max_staleness=1", "run.steps=24", "run.save_every=0", "eval.every=0", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.kill_everything()
    held.let_go()
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))
    resumed = run_to_end(tmp_path / "run", *overrides, "resume=auto")
    assert resumed.code == 0, resumed.output
    resumed.assert_all_samples_accounted()
    assert resumed.summary["steps"] == len(resumed.steps()) == 24


def test_what_a_run_leaves_that_lost_its_supervisor_is_cleaned(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES) as live:
        live.wait_step(2)
        live.kill_owners()
        doctor = [sys.executable, "-m", "relax_core", "doctor", "--clean"]
        environment = {**os.environ, "TMPDIR": str(live.temporary)}
        told, deadline = "", time.monotonic() + 60.0
        while live.places():  # the kernel may release locks late
            assert time.monotonic() < deadline, told
            done = subprocess.run(doctor, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
            told += done.stdout
        assert f"removed {live.temporary}/rlx-" in told and f"of the run in {live.folder}" in told
        while live.processes():  # Ray's processes end by themselves
            assert time.monotonic() < deadline, live.processes()
            time.sleep(0.05)

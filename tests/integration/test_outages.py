"""Tests that a run continues after a temporarily full disk and a locked ledger, and loses no sample."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.live_run import ROOT, LiveRun
from tests.outages import filled, locked

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 60
SETTINGS = (f"run.steps={STEPS}", "run.save_every=4", "eval.every=0", "run.export_hf=false")
FULL, LOCKED = "database or disk is full", "database is locked"
BEGINS, ENDS = "the ledger waits for the disk: ", "the ledger is written again; it had waited for the disk: "
ASK_S = 120.0


def test_a_full_disk_and_a_lock_on_the_ledger_are_waited_out(small_disk: Callable[[str], Path]) -> None:
    """The screen reports the pause. The wait graph also reports it while the trainer waits for its snapshot."""
    disk = small_disk("150m")
    with LiveRun(disk / "run", *SETTINGS) as live:
        live.wait_checkpoint(4)
        with filled(disk):
            live.wait_for("the full disk to be named", lambda: BEGINS + FULL in live.output())
        live.wait_for("the ledger to be written", lambda: ENDS + FULL in live.output())
        with locked(live.folder / "ledger.sqlite"):
            live.wait_for("the lock to be named", lambda: BEGINS + LOCKED in live.output())
            live.wait_for("the wait graph to name it", lambda: "actor waits for the ledger for" in stall(live.folder))
        run = live.finish()
    assert run.code == 0, run.output
    assert ENDS + LOCKED in run.output
    run.assert_all_samples_accounted()
    assert run.summary["recoveries"] == [] and run.summary["steps"] == STEPS
    assert run.checkpoints()[-1] == STEPS
    assert len(run.steps()) == STEPS  # the metrics of all steps are there
    lines = (run.folder / "logs" / "recoveries.log").read_text()
    assert BEGINS + FULL in lines and ENDS + LOCKED in lines


def stall(folder: Path) -> str:
    """Returns the output of `relax stall`."""
    command = [sys.executable, "-m", "relax_core", "stall", str(folder)]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ASK_S, check=False)
    return asked.stdout + asked.stderr

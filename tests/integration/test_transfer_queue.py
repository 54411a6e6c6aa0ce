"""Tests that a run with bus=transfer_queue survives the loss of the queue's processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


def test_a_lost_storage_unit_is_a_lost_bus(tmp_path: Path) -> None:
    """All services restart from the newest checkpoint with a new TransferQueue."""
    overrides = ("mode.max_staleness=1", "run.steps=40", "eval.every=0", "run.save_every=5")
    held = TrainingGate(tmp_path, updates=20)
    with LiveRun(tmp_path / "run", "bus=transfer_queue", *overrides, *held.overrides) as live:
        live.wait_checkpoint(10)
        live.kill("ray::StorageHost")
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    assert run.summary["steps"] == 40
    assert run.summary["ledger"]["trained"] == 40 * 8 * 16
    (recovery,) = run.summary["recoveries"]
    assert "bus" in recovery["cause"], recovery

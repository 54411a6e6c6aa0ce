"""Tests stops of a run: an early stop, a signal to all processes while a trainer dies, and two stops."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from relax_core.control.controller_process import AGAIN_S
from tests.integration.live_run import LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

ACTOR = "ray::PolicyTrainer"


def test_before_the_first_step_it_ends_without_an_export(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run") as live:
        live.wait_for("the services' start", lambda: any("ray::" in line for line in live.processes().values()))
        live.terminate()
        run = live.finish()
    assert run.code == 143, run.output
    assert "stopped before a train step was done" in run.output
    assert run.checkpoints() == [] and not (tmp_path / "run" / "hf").exists()


def test_a_signal_to_every_process_and_a_trainer_that_dies_meanwhile(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=20)
    overrides = ("eval.every=0", "run.save_every=10", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_checkpoint(20)
        services = {pid for pid, line in live.processes().items() if "ray::" in line and "IDLE" not in line}
        live.signal_all(signal.SIGTERM)
        live.wait_stop_received()
        time.sleep(1.5 * AGAIN_S)  # wait: other processes than the supervisor that react to the signal end
        assert len(services) >= 4 and services <= live.processes().keys()  # bus, actor, engine, rollout
        live.kill(ACTOR)
        run = live.finish()
    assert run.code == 143, run.output
    assert run.summary["outcome"] == "stopped"
    (recovery,) = run.summary["recoveries"]
    assert (recovery["tier"], recovery["cause"], recovery["from_step"]) == (2, "actor-0 died", 20)
    assert run.checkpoints()[-1] == run.summary["steps"] == 20
    books = run.summary["ledger"]
    assert books["lost"] == books["trained_twice"] == 0
    assert books["issued"] == books["trained"] + books["open"], "the current step is in the checkpoint"


def test_a_busy_trainer_is_not_waited_for_after_a_second_signal(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=3)
    with LiveRun(tmp_path / "run", "eval.every=0", "run.stall_timeout_s=6000", *held.overrides) as live:
        live.wait_step(2)
        live.interrupt()
        live.wait_stop_received()
        time.sleep(1.5 * AGAIN_S)  # an earlier signal would count as the same Ctrl-C
        live.interrupt()
        run = live.finish(deadline_s=240.0)
    assert run.code == 130, run.output
    assert "ended at once, without a checkpoint" in run.output

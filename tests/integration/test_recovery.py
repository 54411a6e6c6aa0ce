"""Tests processes that die or freeze: the run recovers in place or from a checkpoint, and the ledger is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.observe.alarms import read_alarms
from tests.integration.live_run import ENGINE, ROLLOUT, FinishedRun, LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

ACTOR, OTHER_RANK, BUS, ADVANTAGES = "ray::PolicyTrainer", "ray::ActorRank", "ray::BusActor", "ray::AdvantagesWorker"
OVERRIDES = ("eval.every=0", "run.save_every=10", "run.export_hf=false")


def assert_whole(run: FinishedRun, *, steps: int) -> list[dict[str, Any]]:
    """Checks that all steps are done and every sample has one end and is not stale. Returns the recoveries."""
    assert run.code == 0, run.output
    assert run.summary["steps"] == run.summary["steps_recorded"] == steps
    run.assert_all_samples_accounted()
    assert run.summary["ledger"]["trained"] == steps * 8 * 16
    assert run.summary["staleness"]["max"] <= 1
    recoveries: list[dict[str, Any]] = run.summary["recoveries"]
    assert all(recovery["seconds"] > 0.0 for recovery in recoveries), recoveries
    return recoveries


def test_another_rank_before_the_first_checkpoint_then_the_bus(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=12)
    overrides = (*OVERRIDES, "run.steps=45", "run.save_every=25", "parallel.dp=2", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.kill(OTHER_RANK)
        live.wait_noticed(1)
        held.allow(32)
        live.wait_recovered(1)
        live.wait_checkpoint(25)
        live.kill(BUS)
        held.let_go()
        run = live.finish()
    other_rank, bus = assert_whole(run, steps=45)
    assert (other_rank["tier"], other_rank["from_step"]) == (2, 0)
    # The lead rank may report the loss of the other rank before Ray reports the death of this rank.
    assert other_rank["cause"] == "actor-1 died" or other_rank["cause"].startswith(
        "actor-0 failed: RankLost: actor-1 was lost"
    )
    assert (bus["tier"], bus["cause"], bus["from_step"]) == (2, "the bus died", 25)
    assert 25 <= bus["at_step"] < 45


def test_the_trainer_then_a_frozen_worker_and_a_frozen_engine(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=12)
    role = "algo.normalize_std=batch"
    saved = (*OVERRIDES, "run.save_every=4", "run.steps=50")
    lora = ("model.lora.rank=8", "optimizer.lr=8e-3")  # recovered trainers and engines also need the base model
    overrides = (*saved, "run.heartbeat_timeout_s=10", role, *lora, *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_checkpoint(4)
        live.kill(ACTOR)
        live.wait_recovered(1)  # the new trainer pauses after 12 updates, at step 24 or before
        live.freeze(ADVANTAGES)
        live.wait_noticed(2)
        held.allow(24)  # pauses at step 36 or before
        live.wait_recovered(2)
        live.freeze(ENGINE)
        held.let_go()
        run = live.finish()
    actor, advantages, engine = assert_whole(run, steps=50)
    assert run.summary["logprob_gap"]["max"] <= 1e-4  # trainer and engines have the same sums of base and factors
    assert (actor["tier"], actor["cause"]) == (2, "actor-0 died")
    assert actor["from_step"] >= 4
    assert advantages["tier"] == engine["tier"] == 1
    assert advantages["cause"].startswith("advantages-0 froze (no answer for ")
    assert engine["cause"].startswith("engine-0 froze (no answer for ")
    told = [(alarm.event, alarm.kind) for alarm in read_alarms(run.folder)]
    assert [alarm for alarm in told if alarm[0] in ("recovery", "engine_lost", "finished")] == [
        *(("recovery", "new"), ("engine_lost", "new"), ("finished", "new"))
    ]


def test_past_the_limit_the_run_ends_with_the_first_cause(tmp_path: Path) -> None:
    held = TrainingGate(tmp_path, updates=12)
    overrides = (*OVERRIDES, "run.steps=40", "run.max_recoveries=1", *held.overrides)
    with LiveRun(tmp_path / "run", *overrides) as live:
        live.wait_step(2)
        live.kill(BUS)
        live.wait_recovered(1)
        live.kill(ACTOR)
        run = live.finish()
    assert run.code == 1
    failure = "failed: the bus died; recovered, then: actor-0 died (run.max_recoveries=1)"
    assert failure in run.output
    assert [alarm.event for alarm in read_alarms(run.folder)][-1] == "failed"
    assert run.summary["outcome"] == failure
    assert [recovery["cause"] for recovery in run.summary["recoveries"]] == ["the bus died"]


def test_the_watchdog_names_who_stands_still(tmp_path: Path) -> None:
    watched = ("run.heartbeat_timeout_s=600", "run.stall_timeout_s=100", "run.steps=24")
    log, blocker = tmp_path / "run" / "logs" / "watchdog.log", "blocker: rollout-0\n"
    held = TrainingGate(tmp_path, updates=12)
    with LiveRun(tmp_path / "run", *OVERRIDES, *watched, *held.overrides) as live:
        live.wait_step(5)
        pid = live.freeze(ROLLOUT)
        held.let_go()
        live.wait_for("the watchdog", lambda: log.exists() and log.read_text().count(blocker) >= 2)
        live.thaw(pid)
        run = live.finish()
    assert_whole(run, steps=24)
    first = next(report for report in log.read_text().split("no train step ended") if blocker in report)
    assert "actor-0: waits" in first and "on bus for" in first
    assert "in flight in rollout (oldest g0" in first and "owed by rollout" in first
    assert f"rollout-0: pid {pid}, state stopped" in first
    told = [alarm for alarm in read_alarms(run.folder) if alarm.event == "stalled"]
    # On a loaded machine the start takes longer than a fifth of run.stall_timeout_s, and the run reports the start
    # first.
    assert [alarm.kind for alarm in told] == ["new", "over"] * (len(told) // 2)
    new = [alarm.text for alarm in told if alarm.kind == "new"]
    assert sum("blocker: rollout-0" in text for text in new) == 1
    assert all("blocker: rollout-0" in text or "train step 0 of" in text for text in new), new
    assert "no train step ended" in run.output  # stderr has the report, too

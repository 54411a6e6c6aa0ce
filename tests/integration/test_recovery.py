"""Processes die or freeze in mid-run: the run goes on by itself, from where it must, and the books close."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_run import ENGINE, FinishedRun, LiveRun

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

ACTOR, PEER, BUS, ADVANTAGES = "ray::ActorWorker", "ray::ActorPeer", "ray::BusActor", "ray::AdvantagesWorker"
ROLLOUT = "ray::RolloutWorker"
OVERRIDES = ("eval.every=0", "run.save_every=10", "run.export_hf=false", "run.heartbeat_timeout_s=4")
QUICK_S = 20.0  # 10 on quiet cores


def wait_recovered(live: LiveRun, count: int) -> None:
    live.wait_for(f"recovery {count}", lambda: live.output().count("training went on") >= count)


def assert_whole(run: FinishedRun, *, steps: int) -> list[dict[str, Any]]:
    """All steps done, every sample booked once, none too old; returns the recoveries."""
    assert run.code == 0, run.output
    assert run.summary["steps"] == run.summary["steps_recorded"] == steps
    run.assert_books_closed()
    assert run.summary["ledger"]["trained"] == steps * 8 * 16
    assert run.summary["staleness"]["max"] <= 1
    recoveries: list[dict[str, Any]] = run.summary["recoveries"]
    assert all(0.0 < recovery["seconds"] < QUICK_S for recovery in recoveries), recoveries
    return recoveries


def test_a_peer_before_the_first_checkpoint_then_the_bus(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES, "run.steps=130", "run.save_every=80", "parallel.dp=2") as live:
        live.wait_step(2)
        live.kill(PEER)
        wait_recovered(live, 1)
        live.wait_for("a checkpoint", lambda: (tmp_path / "run/checkpoints/step_00000080/meta.json").exists())
        live.kill(BUS)
        run = live.finish()
    peer, bus = assert_whole(run, steps=130)
    assert (peer["tier"], peer["cause"], peer["from_step"]) == (2, "actor-1 died", 0)
    assert (bus["tier"], bus["cause"], bus["from_step"]) == (2, "the bus died", 80)
    assert 80 <= bus["at_step"] < 130


def test_the_trainer_then_a_frozen_worker_and_a_frozen_engine(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES, "run.steps=90") as live:
        live.wait_step(12)
        live.kill(ACTOR)
        wait_recovered(live, 1)
        live.freeze(ADVANTAGES)
        wait_recovered(live, 2)
        live.freeze(ENGINE)
        run = live.finish()
    actor, advantages, engine = assert_whole(run, steps=90)
    assert (actor["tier"], actor["cause"]) == (2, "actor-0 died")
    assert actor["from_step"] >= 10
    assert advantages["tier"] == engine["tier"] == 1
    assert advantages["cause"].startswith("advantages-0 froze (no answer for ")
    assert engine["cause"].startswith("engine-0 froze (no answer for ")


def test_past_the_limit_the_run_ends_with_the_first_cause(tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *OVERRIDES, "run.steps=90", "run.max_recoveries=1") as live:
        live.wait_step(2)
        live.kill(BUS)
        wait_recovered(live, 1)
        live.kill(ACTOR)
        run = live.finish()
    assert run.code == 1
    failure = "failed: the bus died; recovered, then: actor-0 died (run.max_recoveries=1)"
    assert failure in run.output
    assert run.summary["outcome"] == failure
    assert [recovery["cause"] for recovery in run.summary["recoveries"]] == ["the bus died"]


def test_the_watchdog_names_who_stands_still(tmp_path: Path) -> None:
    watched = ("run.heartbeat_timeout_s=120", "run.watch_after_s=4", "run.steps=60")
    log, culprit = tmp_path / "run" / "logs" / "watchdog.log", "culprit: rollout-0\n"
    with LiveRun(tmp_path / "run", *OVERRIDES, *watched) as live:
        live.wait_step(5)
        pid = live.freeze(ROLLOUT)
        live.wait_for("the watchdog", lambda: log.exists() and log.read_text().count(culprit) >= 2)
        live.thaw(pid)
        run = live.finish()
    assert_whole(run, steps=60)
    first = next(report for report in log.read_text().split("no train step ended") if culprit in report)
    assert "actor-0: waits" in first and "on bus for" in first
    assert "in flight in rollout (oldest g0" in first and "owed by rollout" in first
    assert f"rollout-0: pid {pid}, state T (stopped)" in first
    assert "no train step ended" in run.output  # on stderr, too

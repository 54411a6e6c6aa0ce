"""Tests two engines with over-sampling and groups that are aborted at each weight change. One engine is stopped for a
while, and later one engine is killed.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from relax_core.bus.ledger_reader import LedgerFile
from relax_core.cli import stall_command
from tests.integration.live_run import ENGINE, LiveRun
from tests.integration.training_gate import TrainingGate

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STEPS = 40
OVERRIDES = (
    "engine.count=2",
    "engine.max_running_samples=4",  # one group at a time: slower than training, so weights change within groups
    "algo.group_size=4",
    "rollout.prompts_per_step=32",
    f"run.steps={STEPS}",
    "rollout.over_sampling=1.5",
    "rollout.partial=abort",
    "rollout.surplus=keep",
    "mode.max_staleness=1",
    "eval.every=0",
    "run.save_every=0",
    "run.export_hf=false",
    "run.heartbeat_timeout_s=600",  # the run must not kill the stopped engine
)
STILL_STEPS = 6  # train steps while an engine is stopped


def test_one_of_two_engines_stands_still_and_one_is_killed_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = TrainingGate(tmp_path, updates=20)
    with LiveRun(tmp_path / "run", *OVERRIDES, *held.overrides) as live:
        live.wait_step(10)
        engines = [pid for pid, line in live.processes().items() if ENGINE in line]
        assert len(engines) == 2
        os.kill(engines[1], signal.SIGSTOP)
        live.wait_step(10 + STILL_STEPS)  # no process waits for the stopped engine
        assert stall_command.main([str(live.folder)]) == 0, "the run continues, and its controller answers"
        os.kill(engines[1], signal.SIGCONT)
        os.kill(engines[0], signal.SIGKILL)
        live.wait_noticed(1)
        held.let_go()
        run = live.finish()
    assert run.code == 0, run.output
    report = capsys.readouterr().out
    assert "which worker waits for which" in report and "blocker: " in report
    assert not list((run.folder / "stall").iterdir()), "answered requests are removed"
    run.assert_all_samples_accounted()
    books = run.summary["ledger"]
    assert books["trained"] == STEPS * 8 * 16, "a step was incomplete"
    assert set(books["dropped"]) <= {"over_sampled", "stale"} and books["dropped"]["over_sampled"] > 0
    assert run.summary["staleness"]["max"] <= 1
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line["values"]["aborts"] for line in lines if line["source"] == "rollout") > 0
    assert [recovery["tier"] for recovery in run.summary["recoveries"]] == [1], (
        "the loss of an engine restarts no services"
    )
    with LedgerFile(run.folder / "ledger.sqlite") as file:
        lives = [life for step in range(STEPS) for life in file.samples({"step": step}) if life.state == "trained"]
    made = [event.made for life in lives for event in life.events if event.made is not None]
    assert len(made) == books["trained"], "a sample was put twice"
    turns = [turn for episode in made for turn in episode.turns]
    assert {turn.engine for turn in turns} == {"engine-0", "engine-1"}
    for turn in turns:
        assert sum(tokens for _, tokens in turn.versions) == turn.end - turn.start
        assert [version for version, _ in turn.versions] == sorted({version for version, _ in turn.versions})

"""Tests that the user's view of a run follows the event log and reports failing trackers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from relax_core.config.compose import load_config
from relax_core.config.schema import TrackerConfig
from relax_core.contracts.bus import BusProgress, LedgerCounts
from relax_core.control import run_alarms
from relax_core.control.run_alarms import RunAlarms
from relax_core.control.run_reporter import EVENTS_LOG, RunReporter
from relax_core.observe.event_log import CONTROLLER, EventWriter, read_metrics
from relax_core.observe.panel import Panel
from relax_core.observe.trackers.tracker_process import Trackers
from tests.outages import filled


def progress_of(version: int, **dropped: int) -> BusProgress:
    ledger = LedgerCounts(issued=99, trained=0, dropped=dropped, open=0, lost=0, trained_twice=0)
    return BusProgress(
        version=version,
        admitted=0,
        in_flight=0,
        waiting=0,
        leased=0,
        credits=0,
        staleness_histogram={},
        ledger=ledger,
    )


def test_drops_by_reason_and_problems_are_reported_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    """The view reports dropped samples, a tracker that cannot write, and steps with only truncated answers."""
    monkeypatch.setattr(run_alarms, "SIGNAL_RULES", ("actor/truncated >= 1 for 3 steps",))
    config = load_config([f"run.dir={tmp_path}", "rollout.max_new_tokens=8"])
    (tmp_path / "tensorboard").write_text("a file where the sink wants its folder")
    trackers = Trackers(TrackerConfig(tensorboard=True), tmp_path)
    actor, events = EventWriter(tmp_path, "actor-0"), EventWriter(tmp_path, CONTROLLER)
    screen, lines = io.StringIO(), tmp_path / "logs" / EVENTS_LOG
    for step in range(3):
        actor.record("actor", step, {"truncated": 1.0})
    actor.close()
    with Panel(9, tmp_path, "title", live=False, console=Console(file=screen, width=400)) as panel:
        view = RunReporter(
            panel,
            events,
            run_dir=tmp_path,
            trackers=trackers,
            step=0,
            alarms=RunAlarms(config, again=True, clock=lambda: 0.0),
        )

        def show(step: int, **dropped: int) -> None:
            progress = progress_of(step, **dropped)
            view.read(step=step, progress=progress)
            view.send_alarms()
            view.draw(progress=progress, roles=[], message="")
            view.check_trackers()

        show(0)
        assert [record.step for record in view.records] == [0, 1, 2]
        for _ in range(3):  # one report per step
            show(1, stale=2)
        show(2, stale=2, reward_failed=5)

        def reported() -> bool:
            show(3, stale=2, reward_failed=5)
            return "tensorboard cannot be written" in lines.read_text()

        wait_until(reported, what="the tracker that cannot write")
    assert lines.read_text().count("tensorboard cannot be written") == 1
    assert lines.read_text().count("All answers were cut at rollout.max_new_tokens=8 for 3 train steps") == 1
    assert "All answers were cut" in screen.getvalue()
    events.close()
    drops = {record.step: record.values for record in read_metrics(tmp_path) if record.source == "ledger"}
    assert drops == {
        1: {"dropped/stale": 2},
        2: {"dropped/stale": 2, "dropped/reward_failed": 5},
        3: {"dropped/stale": 2, "dropped/reward_failed": 5},
    }
    assert sum(record.source == "ledger" for record in read_metrics(tmp_path)) == 3
    _, lacking = trackers.close(records=6, timeout_s=60.0)
    assert lacking == {"tensorboard": 6}


def test_an_outage_of_the_ledger_is_reported_and_the_log_gets_its_lines_later(
    small_disk: Callable[[str], Path],
) -> None:
    folder = small_disk("1m")
    screen, lines = io.StringIO(), folder / "logs" / EVENTS_LOG
    trackers = Trackers(TrackerConfig(tensorboard=False), folder)
    events = EventWriter(folder, CONTROLLER)
    with Panel(9, folder, "title", live=False, console=Console(file=screen, width=400)) as panel:
        view = RunReporter(panel, events, run_dir=folder, trackers=trackers, step=0)
        with filled(folder):
            for seconds in (0, 1):
                problem = f"database or disk is full since {seconds} s"
                view.read(step=0, progress=msgspec.structs.replace(progress_of(0), ledger_problem=problem))
            assert not lines.exists() or lines.read_bytes() == b""
        view.read(step=0, progress=progress_of(0))
    told = [
        "the ledger waits for the disk: database or disk is full since 0 s",
        "the ledger is written again; it had waited for the disk: database or disk is full since 1 s",
    ]
    assert lines.read_text().splitlines() == told
    assert all(screen.getvalue().count(line) == 1 for line in told)
    events.close()
    trackers.end()

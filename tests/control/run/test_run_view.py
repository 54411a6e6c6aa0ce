"""The user's view of a run with a real metrics process, which freezes or reports problems."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from rich.console import Console

from relax_core.config.sections.tracker_schema import TrackerConfig
from relax_core.contracts.bus import BusProgress, LedgerCounts
from relax_core.control.run import run_view
from relax_core.control.run.run_view import EVENTS_LOG, RunView
from relax_core.observe.findings import SignalWatch
from relax_core.observe.panel import Panel
from relax_core.observe.service.metrics_actor import MetricsClient, MetricsUnavailable, start_metrics
from relax_core.observe.service.sinks import read_metrics

NAMESPACE = "test-run-view"
DEADLINE_S = 120.0


def reported(client: MetricsClient) -> int:
    """Returns how many records the metrics have, and 0 while they do not answer, as a loaded machine may let them."""
    try:
        return client.poll(0)[0]
    except MetricsUnavailable:
        return 0


def test_frozen_metrics_are_started_again_with_what_the_files_hold(
    ray_session: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    tracker = TrackerConfig(name="local", tensorboard=False, jsonl=True)
    client = start_metrics(tracker, tmp_path, name=tmp_path.name, namespace=NAMESPACE, max_restarts=1)
    try:
        client.record("actor", 0, {"reward": 0.5})
        client.flush(timeout_s=120.0)
        frozen = ray.get(client._handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120)
        with Panel(5, tmp_path, "title", live=False, console=Console(file=io.StringIO())) as panel:
            view = RunView(
                panel,
                client,
                log_dir=tmp_path / "logs",
                step=0,
                heartbeat_timeout_s=3.0,
                signal_watch=SignalWatch(steps=20, max_new_tokens=8),
            )
            view.show(step=1, progress=None, roles=[], message="")
            os.kill(frozen, signal.SIGSTOP)
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / "logs" / EVENTS_LOG).exists():
                assert time.monotonic() < deadline
                view.show(step=1, progress=None, roles=[], message="")
            wait_until(lambda: reported(client) == 1, what="the restarted metrics", timeout_s=DEADLINE_S)
            client.record("actor", 1, {"reward": 0.6})
            wait_until(lambda: reported(client) == 2, what="the earlier report and the new one")
            client.flush(timeout_s=DEADLINE_S)  # what is reported need not be in the files yet
        assert [record.step for record in read_metrics(tmp_path)] == [0, 1]
        assert ray.get(client._handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120) != frozen
    finally:
        client.end()
        ray.kill(ray.get_actor(tmp_path.name, namespace=NAMESPACE))


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
    ray_session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    """The view reports dropped samples, a sink that cannot be written, and steps with only truncated answers."""
    monkeypatch.setattr(run_view, "HEALTH_S", 0.0)
    (tmp_path / "tensorboard").write_text("a file where the sink wants its folder")
    tracker = TrackerConfig(name="local", tensorboard=True, jsonl=True)
    client = start_metrics(tracker, tmp_path, name=tmp_path.name, namespace=NAMESPACE, max_restarts=0)
    screen = io.StringIO()
    events = tmp_path / "logs" / EVENTS_LOG
    try:
        for step in range(3):
            client.record("actor", step, {"truncated": 1.0})
        client.flush(timeout_s=120.0)
        with Panel(9, tmp_path, "title", live=False, console=Console(file=screen, width=400)) as panel:
            view = RunView(
                panel,
                client,
                log_dir=tmp_path / "logs",
                step=0,
                heartbeat_timeout_s=60.0,
                signal_watch=SignalWatch(steps=3, max_new_tokens=8),
            )

            def show(step: int, **dropped: int) -> None:
                view.show(step=step, progress=progress_of(step, **dropped), roles=[], message="")

            show(0)
            for _ in range(3):  # one report a step
                show(1, stale=2)
            show(2, stale=2, reward_failed=5)

            def reported() -> bool:
                show(3, stale=2, reward_failed=5)
                return "tensorboard cannot be written" in events.read_text()

            wait_until(reported, what="the sink that cannot be written")
        assert events.read_text().count("tensorboard cannot be written") == 1
        assert events.read_text().count("All answers were cut at rollout.max_new_tokens=8 for 3 train steps") == 1
        assert "All answers were cut" in screen.getvalue() and "metrics lack" in screen.getvalue()
        client.flush(timeout_s=120.0)
        drops = {record.step: record.values for record in read_metrics(tmp_path) if record.source == "ledger"}
        assert drops == {
            1: {"dropped/stale": 2},
            2: {"dropped/stale": 2, "dropped/reward_failed": 5},
            3: {"dropped/stale": 2, "dropped/reward_failed": 5},
        }
        assert sum(record.source == "ledger" for record in read_metrics(tmp_path)) == 3
    finally:
        client.end()
        ray.kill(ray.get_actor(tmp_path.name, namespace=NAMESPACE))

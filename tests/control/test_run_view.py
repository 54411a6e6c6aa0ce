"""The user's view of a run whose metrics process freezes, with a real one."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import ray
from rich.console import Console

from relax_core.config.schema import TrackerConfig
from relax_core.control.run_view import EVENTS_LOG, RunView
from relax_core.observe.metrics_actor import MetricsClient, MetricsUnavailable, start_metrics
from relax_core.observe.panel import Panel
from relax_core.observe.signal_watch import SignalWatch
from relax_core.observe.sinks import read_metrics

NAMESPACE = "test-run-view"
DEADLINE_S = 120.0


def answers(client: MetricsClient) -> bool:
    try:
        client.poll(0)
    except MetricsUnavailable:  # it is on its way
        return False
    return True


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
            wait_until(lambda: answers(client), what="the restarted metrics", timeout_s=DEADLINE_S)
            client.record("actor", 1, {"reward": 0.6})
            wait_until(lambda: client.poll(0)[0] == 2, what="the earlier report and the new one")
        assert [record.step for record in read_metrics(tmp_path)] == [0, 1]
        assert ray.get(client._handle.__ray_call__.remote(lambda _: os.getpid()), timeout=120) != frozen
    finally:
        ray.kill(ray.get_actor(tmp_path.name, namespace=NAMESPACE))

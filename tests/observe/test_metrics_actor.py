"""The metrics service as a real Ray actor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.config.sections.tracker_schema import TrackerConfig
from relax_core.observe.service.metrics_actor import MetricsClient, MetricsUnavailable, connect_metrics, start_metrics
from relax_core.observe.service.metrics_service import MetricsHealth
from relax_core.observe.service.sinks import read_metrics, read_texts

NAMESPACE = "test-metrics"


@pytest.fixture
def client(ray_session: str, tmp_path: Path) -> Iterator[MetricsClient]:
    tracker = TrackerConfig(name="local", tensorboard=True, jsonl=True)
    client = start_metrics(tracker, tmp_path, name=tmp_path.name, namespace=NAMESPACE, max_restarts=1)
    client.poll(0, timeout_s=180)  # the actor has started
    yield client
    client.end()
    ray.kill(ray.get_actor(tmp_path.name, namespace=NAMESPACE))


@ray.remote(num_cpus=1)
def report_from_another_process(name: str) -> int:
    client = connect_metrics(name, namespace=NAMESPACE)
    for step in range(5):
        client.record("rollout", step, {"samples": 8})
    client.flush(timeout_s=120.0)
    return client.errors


def test_any_process_reports_and_the_panel_polls(client: MetricsClient, tmp_path: Path) -> None:
    client.record("actor", 0, {"reward": 0.5})
    client.record_texts("eval", 0, [{"prompt": "12", "answer": "21", "response": "1", "exact": False}])
    assert ray.get(report_from_another_process.remote(tmp_path.name), timeout=180) == 0
    client.flush(timeout_s=120.0)
    cursor, records = client.poll(0)
    assert cursor == 6
    assert sorted((record.source, record.step) for record in records) == [
        ("actor", 0),
        *(("rollout", step) for step in range(5)),
    ]
    assert client.poll(cursor) == (6, [])
    assert client.texts("eval")[0].rows[0]["answer"] == "21"
    assert client.health() == MetricsHealth(problems=[], dropped={})
    assert client.close() == MetricsHealth(problems=[], dropped={})
    assert len(read_metrics(tmp_path)) == 6
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_mark_that_was_waited_for_stands_before_the_reports_of_others(client: MetricsClient, tmp_path: Path) -> None:
    marked = client.send_mark(3)
    marked()
    assert ray.get(report_from_another_process.remote(tmp_path.name), timeout=180) == 0
    _, records = client.poll(0)
    assert [(record.source, record.step) for record in records] == [
        ("run", 3),
        *(("rollout", step) for step in range(5)),
    ]
    marked()  # the next attempt calls it too


def test_a_mark_whose_actor_dies_raises(client: MetricsClient, tmp_path: Path) -> None:
    actor: Any = ray.get_actor(tmp_path.name, namespace=NAMESPACE)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)  # before the actor can take the mark
    marked = client.send_mark(3, timeout_s=60.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MetricsUnavailable, match="mark_resume"):
        marked()


def test_a_failed_report_is_counted_not_raised(client: MetricsClient, wait_until: Callable[..., None]) -> None:
    client.close()
    client.record("actor", 0, {"reward": 0.5})
    wait_until(lambda: client.errors == 1, what="the count of the failed report")
    assert "closed" in client.last_error
    with pytest.raises(ValueError, match="many"):
        client.record("actor", 0, {"samples": "many"})  # type: ignore[dict-item]


def test_a_killed_actor_takes_up_what_the_files_hold_and_its_writers_keep_the_rest(
    client: MetricsClient, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Records were written before the kill, taken and not written, or reported while no actor runs."""
    client.record("actor", 0, {"reward": 0.5})
    client.record_texts("eval", 0, [{"response": "before"}])
    client.flush(timeout_s=120.0)
    actor: Any = ray.get_actor(tmp_path.name, namespace=NAMESPACE)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    client.record("actor", 1, {"reward": 0.5})
    os.kill(pid, signal.SIGKILL)
    client.record("actor", 2, {"reward": 0.5})

    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the actor's process")
    client.record("actor", 3, {"reward": 0.5})
    wait_until(lambda: answers(client), what="the restart")
    client.mark_resume(4, timeout_s=120.0)
    client.record("actor", 4, {"reward": 0.75})
    client.flush(timeout_s=120.0)
    expected = [*(("actor", step) for step in range(4)), ("run", 4), ("actor", 4)]
    assert [(record.source, record.step) for record in client.poll(0)[1]] == expected
    assert [(record.source, record.step) for record in read_metrics(tmp_path)] == expected
    assert client.texts("eval")[0].rows == [{"response": "before"}]
    assert len(read_texts(tmp_path)) == 1 and client.errors == 0


def answers(client: MetricsClient) -> bool:
    try:
        client.poll(0)
    except MetricsUnavailable:
        return False
    return True


def has_exited(client: MetricsClient) -> bool:
    try:
        client.poll(0)
    except MetricsUnavailable as error:
        return "metrics actor has exited or is restarting, poll had no answer" in str(error)
    return False


def test_a_dead_actor_is_named_and_reports_to_it_are_kept(
    ray_session: str, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    tracker = TrackerConfig(name="none", tensorboard=False, jsonl=False)
    client = start_metrics(tracker, tmp_path, name="short-lived", namespace=NAMESPACE, max_restarts=0)
    client.poll(0, timeout_s=180)
    ray.kill(ray.get_actor("short-lived", namespace=NAMESPACE))
    wait_until(lambda: has_exited(client), what="the end of the actor")
    client.record("actor", 0, {"reward": 0.5})
    wait_until(lambda: "exited or is restarting, take had no answer" in client.last_error, what="a try to deliver it")
    with pytest.raises(MetricsUnavailable, match="flush waits for earlier reports: the metrics actor has exited"):
        client.flush(timeout_s=0.2)
    assert client.errors == 0
    client.end()
    client.record("actor", 1, {"reward": 0.5})
    assert client.errors == 1
    with pytest.raises(ValueError, match="nobody"):
        connect_metrics("nobody", namespace=NAMESPACE)

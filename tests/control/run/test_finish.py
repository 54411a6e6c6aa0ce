"""The end of a run reads the metrics service, or the files if the service does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from relax_core.config.sections.tracker_schema import TrackerConfig
from relax_core.control.run import finish
from relax_core.control.run.finish import RunRecords, collect, write_end
from relax_core.observe.service.metrics_actor import start_metrics
from relax_core.observe.service.metrics_service import MetricsHealth
from relax_core.observe.service.records import bad_rows_kind, metric_record
from tests.bus.make_rows import make_core

NAMESPACE = "test-finish"


def left_out(*rows: int) -> list[dict[str, str]]:
    return [{"row": str(row), "reason": "bad_row:answer", "text": f"line {row}"} for row in rows]


def test_the_rows_that_any_rollout_worker_left_out_are_named_once(ray_session: str, tmp_path: Path) -> None:
    tracker = TrackerConfig(name="local", tensorboard=False, jsonl=True)
    metrics = start_metrics(tracker, tmp_path, name=tmp_path.name, namespace=NAMESPACE, max_restarts=0)
    for worker, rows in ((0, [3]), (1, [5]), (0, [3, 8]), (1, [5, 3])):  # each report holds all of them
        metrics.record_texts(bad_rows_kind(worker), 0, left_out(*rows))
    metrics.flush(timeout_s=120.0)
    progress = make_core().progress()
    there = collect(metrics, progress, run_dir=tmp_path, rollout_workers=2)
    ray.kill(ray.get_actor(tmp_path.name, namespace=NAMESPACE))
    unanswered = collect(metrics, progress, run_dir=tmp_path, rollout_workers=2)
    metrics.end()
    assert unanswered.health.problems and not there.health.problems
    for end in (there, unanswered):
        assert end.bad_rows == left_out(3, 8, 5)


def test_a_picture_that_cannot_be_drawn_is_one_line_and_the_summary_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(finish, "plot_curves", fail)
    records = [metric_record("actor", 0, {"reward": 0.5, "exact": 0.5, "step_ms": 1.0})]
    health = MetricsHealth(problems=[], dropped={})
    end = RunRecords(records=records, texts=[], bad_rows=[], progress=make_core().progress(), health=health)
    write_end(tmp_path, end, meta={"outcome": "finished", "wall_s": 1.0}, started=0.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "curves.png" in line and "UnicodeDecodeError" in line and (tmp_path / "summary.json").is_file()

"""Tests what the end of a run reads from the event log: all metrics, the first and newest answers, left out rows."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.schema import TrackerConfig
from relax_core.control.finish import collect
from relax_core.observe.event_log import CONTROLLER, EventWriter, bad_rows_kind
from relax_core.observe.trackers.tracker_process import Trackers
from tests.bus.make_rows import make_core


def left_out(*rows: int) -> list[dict[str, str]]:
    return [{"row": str(row), "reason": "bad_row:answer", "text": f"line {row}"} for row in rows]


def test_the_log_gives_the_numbers_the_ends_of_the_texts_and_each_row_once(tmp_path: Path) -> None:
    writers = [EventWriter(tmp_path, f"rollout-{worker}") for worker in range(2)]
    for worker, rows in ((0, [3]), (1, [5]), (0, [3, 8]), (1, [5, 3])):  # each report has all rows so far
        writers[worker].record_texts(bad_rows_kind(worker), 0, left_out(*rows))
    for step in range(3):
        writers[0].record_texts("eval", step, [{"prompt": f"p{step}"}])
        writers[1].record("actor", step, {"reward": 0.5})
    for writer in writers:
        writer.close()
    events = EventWriter(tmp_path, CONTROLLER)
    events.record("ledger", 3, {"dropped/stale": 1.0})
    trackers = Trackers(TrackerConfig(tensorboard=False), tmp_path)
    end = collect(events, trackers, make_core().progress(), run_dir=tmp_path, rollout_workers=2)
    assert end.bad_rows == left_out(3, 8, 5) and not end.problems and not end.lacking
    assert [record.step for record in end.records] == [0, 1, 2, 3]
    assert [text.step for text in end.texts] == [0, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4

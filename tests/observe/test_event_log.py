"""Tests the event log: many writers, one order, incomplete lines, a full disk, resumes, cursors and hostile files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from relax_core.observe import event_log
from relax_core.observe.event_log import (
    EVENTS_FOLDER,
    Event,
    EventReader,
    EventWriter,
    GapRecord,
    HistogramRecord,
    MetricRecord,
    TextRecord,
    event_files,
    read_event,
    read_metrics,
    read_texts,
    without_undone,
)


def numbers(step: int, *, source: str = "actor", time_s: float | None = None, **values: float) -> MetricRecord:
    time_s = time.time() if time_s is None else time_s
    return MetricRecord(source=source, step=step, time_s=time_s, values=values or {"reward": 0.5})


def write(run_dir: Path, writer: str, *records: Event, attempt: int = 0) -> None:
    writer = EventWriter(run_dir, writer, attempt=attempt)
    writer.put(*records)  # type: ignore[arg-type]
    writer.close()


def test_each_kind_comes_back_as_it_was_and_nan_stays_nan(tmp_path: Path) -> None:
    histogram = HistogramRecord(
        source="actor", step=1, time_s=3.0, name="reward", limits=[0.5, 1.0], counts=[1, 2], least=0.0, largest=1.0,
        total=1.5, total_of_squares=1.25,
    )  # fmt: skip
    text = TextRecord(kind="eval", step=0, time_s=2.0, rows=[{"prompt": "a\nb", "exact": True, "none": None}])
    write(tmp_path, "actor-0", numbers(0, time_s=1.0, loss=math.nan, reward=1.0), text, histogram)
    first, *later_records = EventReader(tmp_path).each()
    assert isinstance(first, MetricRecord) and math.isnan(first.values["loss"]) and first.values["reward"] == 1.0
    assert later_records == [text, histogram]
    assert read_texts(tmp_path) == read_texts(tmp_path, "eval") == [text] and read_texts(tmp_path, "other") == []
    assert [record.step for record in read_metrics(tmp_path)] == [0]
    (line, *_) = (tmp_path / EVENTS_FOLDER / "0000.actor-0.0.jsonl").read_text().splitlines()
    assert json.loads(line)["type"] == "numbers"


def test_writers_are_read_in_order_of_time_and_a_cursor_gives_each_event_once(tmp_path: Path) -> None:
    write(tmp_path, "actor-0", numbers(0, time_s=1.0), numbers(1, time_s=3.0))
    write(tmp_path, "rollout-0", numbers(0, source="rollout", time_s=2.0), numbers(1, source="rollout", time_s=4.0))
    reader = EventReader(tmp_path)
    assert [record.time_s for record in reader.each()] == [1.0, 2.0, 3.0, 4.0] and reader.count == 4
    assert reader.read() == []
    write(tmp_path, "actor-0", numbers(2, time_s=5.0))  # the writer has restarted, so this is another file
    assert len(event_files(tmp_path)) == 3
    later = EventReader(tmp_path, cursor=json.loads(json.dumps(reader.cursor)))
    assert [record.step for record in later.each()] == [2] == [record.step for record in reader.each()]


def test_files_larger_than_a_read_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "READ_BYTES", 600)
    for name, shift in (("a", 0), ("b", 1)):
        write(tmp_path, name, *(numbers(step, time_s=float(2 * step + shift)) for step in range(100)))
    assert [record.time_s for record in EventReader(tmp_path).each()] == [float(value) for value in range(200)]
    assert list(EventReader(tmp_path, kinds=("texts",)).each()) == []


def test_a_resume_undoes_later_steps_whatever_the_clocks_say(tmp_path: Path) -> None:
    controller = EventWriter(tmp_path, "controller")
    assert controller.begin_attempt(0) == 0 and not event_files(tmp_path)  # no steps to mark
    write(tmp_path, "actor-0", *(numbers(step, time_s=100.0 + step) for step in range(4)))
    assert controller.begin_attempt(2) == 1
    controller.close()
    early = numbers(2, time_s=50.0, reward=0.9)  # from a host with a slow clock
    write(tmp_path, "actor-0", early, attempt=1)
    reader = EventReader(tmp_path)
    records = [record for record in reader.each() if isinstance(record, MetricRecord)]
    assert [(record.source, record.step) for record in records][4:] == [("run", 2), ("actor", 2)]
    assert [record.step for record in without_undone(records)] == [0, 1, 2] and records[-1] == early
    write(tmp_path, "actor-0", numbers(1, time_s=9.0), numbers(3, time_s=9.0))  # written by the abandoned attempt
    assert [record.step for record in reader.each()] == [1]
    second_writer = EventWriter(tmp_path, "controller")
    assert second_writer.begin_attempt(2) == 2  # another process continues the log
    second_writer.close()


def test_a_torn_last_line_hides_no_later_file_and_a_damaged_line_only_itself(tmp_path: Path) -> None:
    write(tmp_path, "actor-0", numbers(0))
    file = tmp_path / EVENTS_FOLDER / "0000.actor-0.0.jsonl"
    line = file.read_bytes()
    with file.open("ab") as opened:
        opened.write(b'{"type":"numbers","source":"act')
    write(tmp_path, "actor-0", numbers(1), attempt=1)
    reader = EventReader(tmp_path)
    assert [record.step for record in reader.each()] == [0, 1] and not reader.problems
    with file.open("ab") as opened:
        opened.write(b"\n" + line.replace(b'"step":0', b'"step":7'))
    assert [record.step for record in reader.each()] == [7]
    assert "is not an event of Relax" in reader.problems[file.name]


def test_hostile_files_are_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "READ_BYTES", 1000)
    write(tmp_path, "actor-0", numbers(0))
    folder = tmp_path / EVENTS_FOLDER
    os.mkfifo(folder / "0000.pipe.0.jsonl")
    (folder / "0000.link.0.jsonl").symlink_to("/dev/zero")
    (folder / "0000.long.0.jsonl").write_bytes(b"x" * 2000)
    (folder / "0000.deep.0.jsonl").write_bytes(b"[" * 900 + b"\n")
    (folder / "else.jsonl").write_text("{}\n")
    reader = EventReader(tmp_path)
    assert [record.step for record in reader.each()] == [0]
    assert reader.problems.keys() == {"0000.long.0.jsonl", "0000.deep.0.jsonl"}


def test_many_files_are_read_in_order_and_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "CALL_BYTES", 8000)
    monkeypatch.setattr(event_log, "MIN_BYTES", 500)
    folder = tmp_path / EVENTS_FOLDER
    folder.mkdir()
    for rank in range(10):
        lines = [metric(step=step, time_s=float(10 * step + rank), pad=900 if step == 3 else 10) for step in range(8)]
        (folder / f"0000.actor-{rank}.0.jsonl").write_bytes(b"".join(lines))
    reader, pieces = EventReader(tmp_path), []
    while piece := reader.read_placed():
        pieces.append(piece)
    found = [record for piece in pieces for record in piece]
    assert [event.time_s for event, _ in found] == [float(number) for number in range(80)]
    assert max(sum(place.size for _, place in piece) for piece in pieces) < 20_000
    assert read_event(tmp_path, found[33][1]) == found[33][0]


def metric(*, step: int, time_s: float, pad: int) -> bytes:
    record = MetricRecord(source="actor", step=step, time_s=time_s, values={"x" * pad: 1.0})
    return msgspec.json.encode(record) + b"\n"


FULL = """
import resource, signal, sys
from pathlib import Path
from relax_core.observe import event_log
from relax_core.observe.event_log import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
event_log.RETRY_S, event_log.KEPT_RECORDS = 0.05, 20
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
writer = EventWriter(Path(sys.argv[1]), "actor-0")
for step in range(30):
    writer.record("actor", step, {"reward": 0.5})
try:
    writer.flush(timeout_s=0.5)
except TimeoutError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.close()
print(writer.left_out, writer.problem or "no problem")
"""


def test_a_full_disk_loses_nothing_that_fits_into_the_queue_and_counts_the_rest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    error, end = done.stdout.splitlines()
    assert "File too large" in error and "Free space" in error
    left_out = int(end.split()[0])
    assert end.endswith("no problem")
    events = list(EventReader(tmp_path).each())
    steps = [event.step for event in events if isinstance(event, MetricRecord)]
    assert steps == list(range(len(steps))) and len(steps) + left_out == 30
    assert sum(event.records for event in events if isinstance(event, GapRecord)) == left_out


def test_a_writer_thread_keeps_the_order_of_many_threads_and_ends(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "rollout-0")
    for step in range(1000):
        writer.record("rollout", step, {"reward": float(step)})
    writer.flush()
    assert [record.step for record in read_metrics(tmp_path)] == list(range(1000))
    writer.close()
    writer.record("rollout", 1000, {"reward": 1.0})
    assert writer.left_out == 1
    with pytest.raises(TypeError):
        writer.record("rollout", 1, {"reward": None})  # type: ignore[dict-item]

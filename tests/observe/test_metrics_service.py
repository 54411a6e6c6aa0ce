"""The service on real sinks, and on sinks like those of plug-ins that are slow, hang or raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_core.contracts.sink import BaseSink
from relax_core.observe.service import sink_thread
from relax_core.observe.service.metrics_service import MetricsService
from relax_core.observe.service.records import ACTOR, Record, by_step, metric_record, without_undone
from relax_core.observe.service.sinks import JsonlSink, read_metrics, read_texts

T = 120.0


class HangingSink(BaseSink):
    """Takes one batch and does not come back before it is let go."""

    name = "hanging disk"

    def __init__(self, *, local: bool = True) -> None:
        self.local = local
        self.let_go = threading.Event()
        self.entered = threading.Event()
        self.written = 0
        self.closed = False

    def write(self, batch: Sequence[Record]) -> None:
        self.entered.set()
        self.let_go.wait()
        self.written += len(batch)

    def close(self) -> None:
        self.closed = True


class RaisingSink(BaseSink):
    """Raises ``error`` with every other batch, from the first on, and with `close`."""

    name = "their SDK"
    local = False

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls = 0
        self.steps: list[int] = []

    def write(self, batch: Sequence[Record]) -> None:
        self.calls += 1
        if self.calls % 2:
            raise self.error
        self.steps += [record.step for record in batch]

    def close(self) -> None:
        raise self.error


def test_poll_gives_every_record_once_and_in_order() -> None:
    service = MetricsService([], head_records=3)
    cursor, seen = 0, []
    for step in range(10):
        service.record("actor", step, {"reward": step / 10})
        if step % 4 == 1:
            cursor, new = service.poll(cursor)
            seen += new
    cursor, new = service.poll(cursor)
    seen += new
    assert [record.step for record in seen] == list(range(10))
    assert seen[7].values == {"reward": 0.7}
    assert service.poll(cursor) == (10, [])
    service.close(timeout_s=T)


def test_flush_returns_when_the_files_have_everything(tmp_path: Path) -> None:
    service = MetricsService([JsonlSink(tmp_path)], batch_s=60.0)
    for step in range(3):
        service.record("actor", step, {"reward": 0.5})
        service.flush(timeout_s=T)
        assert [record.step for record in read_metrics(tmp_path)] == list(range(step + 1))
    service.flush(timeout_s=T)
    service.close(timeout_s=T)


def test_flush_names_the_local_sink_that_hangs() -> None:
    sink = HangingSink()
    service = MetricsService([sink])
    service.record("actor", 0, {})
    assert sink.entered.wait(T)
    with pytest.raises(TimeoutError, match="hanging disk"):
        service.flush(timeout_s=0.1)
    sink.let_go.set()
    service.flush(timeout_s=T)
    assert sink.written == 1
    service.close(timeout_s=T)


def test_a_sink_that_hangs_holds_up_neither_the_files_nor_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint waits for `flush`, which waits for the run's own files alone."""
    monkeypatch.setattr(sink_thread, "HANGS_S", 0.0)
    hanging = HangingSink(local=False)
    service = MetricsService([hanging, JsonlSink(tmp_path)], queue_records=3, batch_s=0.0)
    service.record("actor", 0, {})
    assert hanging.entered.wait(T)
    for step in range(1, 20):
        service.record("actor", step, {"reward": 0.5})
        service.flush(timeout_s=T)
    assert [record.step for record in read_metrics(tmp_path)] == list(range(20))
    health = service.health()
    (problem,) = health.problems
    assert "hanging disk is slow or hangs" in problem
    assert health.dropped == {"hanging disk": 16}  # the sink writes one, and three wait
    assert service.health().problems == []
    end = service.close(timeout_s=0.1)
    assert end.dropped == {"hanging disk": 20}
    assert end.problems == [
        "metrics: hanging disk did not end in time and is abandoned",
        "metrics: hanging disk lacks up to 20 records",
    ]
    assert not hanging.closed
    hanging.let_go.set()


@pytest.mark.parametrize("error", [ValueError("bad tag"), SystemExit(1), KeyError("x"), OSError(28, "No space left")])
def test_whatever_a_sink_raises_is_told_once_counted_and_of_no_concern_to_others(
    tmp_path: Path, error: BaseException
) -> None:
    sink = RaisingSink(error)
    service = MetricsService([sink, JsonlSink(tmp_path)], batch_s=0.0)
    thread = service._sinks[-1]
    assert thread.name == "their SDK"
    for step in range(6):
        service.record("actor", step, {"reward": 0.5})
        thread.flush(deadline=time.monotonic() + T)  # each is a batch of its own
    assert sink.steps == [1, 3, 5]
    health = service.health()
    (problem,) = health.problems
    assert "their SDK cannot be written" in problem and str(error.args[-1]) in problem
    assert health.dropped == {"their SDK": 3}
    end = service.close(timeout_s=T)
    assert [problem.split(":")[1] for problem in end.problems] == [
        " their SDK cannot be closed",
        " their SDK lacks up to 3 records",
    ]
    assert [record.step for record in read_metrics(tmp_path)] == list(range(6))


def test_a_record_that_comes_again_is_kept_once(tmp_path: Path) -> None:
    """A writer without an answer sends a record again, to the same process or to the next one."""
    records: list[Record] = [metric_record("actor", step, {"reward": 0.1 * step}) for step in range(3)]
    first = MetricsService([JsonlSink(tmp_path)])
    assert first.take(records[:2])[0] == 2
    assert first.take(records[1:])[0] == 3
    assert first.flush(timeout_s=T) == (3, 3)
    first.close(timeout_s=T)
    second = MetricsService([JsonlSink(tmp_path)], history=read_metrics(tmp_path))
    late = metric_record("actor", 3, {})
    assert second.take([*records, late])[0] == 1
    second.close(timeout_s=T)
    assert read_metrics(tmp_path) == [*records, late] == second.poll(0)[1]


def test_what_a_writer_had_no_room_for_is_counted() -> None:
    service = MetricsService([])
    service.take([], left_out=3)
    service.take([metric_record("actor", 0, {})], left_out=2)
    assert service.close(timeout_s=T).dropped == {"not delivered": 5}


def test_history_keeps_the_first_and_the_newest_records() -> None:
    service = MetricsService([], head_records=3, tail_records=4)
    for step in range(20):
        service.record("actor", step, {})
    cursor, records = service.poll(0)
    assert cursor == 20
    assert [record.step for record in records] == [0, 1, 2, 16, 17, 18, 19]
    assert [record.step for record in service.poll(18)[1]] == [18, 19]
    assert [record.step for record in service.poll(5)[1]] == [16, 17, 18, 19]
    service.close(timeout_s=T)


def test_texts_keep_the_first_and_the_newest_of_a_kind() -> None:
    service = MetricsService([])
    assert service.texts("eval") == []
    for step in (0, 50, 100):
        service.record_texts("eval", step, [{"prompt": "12", "response": str(step)}])
        service.record_texts("other", step, [])
    assert [text.step for text in service.texts("eval")] == [0, 100]
    assert service.texts("eval")[1].rows == [{"prompt": "12", "response": "100"}]
    service.close(timeout_s=T)


def test_what_is_not_a_number_is_refused_to_the_caller() -> None:
    service = MetricsService([])
    with pytest.raises(ValueError, match="many"):
        service.record("actor", 0, {"samples": "many"})  # type: ignore[dict-item]
    assert service.poll(0) == (0, [])
    service.close(timeout_s=T)


def test_a_hanging_disk_never_blocks_the_caller_and_is_told_once() -> None:
    sink = HangingSink()
    service = MetricsService([sink], queue_records=100, batch_s=0.0)
    service.record("actor", 0, {})
    assert sink.entered.wait(T)

    def report() -> None:
        for step in range(1, 1001):
            service.record("actor", step, {"reward": 1.0})

    caller = threading.Thread(target=report, daemon=True)
    caller.start()
    caller.join(T)
    assert not caller.is_alive()
    assert service.poll(0)[0] == 1001
    (problem,) = service.health().problems
    assert "hanging disk" in problem and "while 100 wait" in problem
    assert service.health().problems == []
    sink.let_go.set()
    end = service.close(timeout_s=T)
    assert sink.written == 101 and sink.closed
    assert end.problems == ["metrics: hanging disk lacks up to 900 records"]
    with pytest.raises(RuntimeError, match="closed"):
        service.record("actor", 1001, {})


def test_records_of_many_threads_reach_the_file(tmp_path: Path) -> None:
    service = MetricsService([JsonlSink(tmp_path)], batch_s=0.0)

    def report(source: str) -> None:
        for step in range(200):
            service.record(source, step, {"value": step})

    threads = [threading.Thread(target=report, args=(f"role{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.record_texts("eval", 3, [{"prompt": "a", "exact": True}])
    assert service.close(timeout_s=T).problems == []
    records = read_metrics(tmp_path)
    assert records == service.poll(0)[1]
    for number in range(4):
        assert list(by_step(records, f"role{number}")) == list(range(200))
    (text,) = read_texts(tmp_path)
    assert (text.kind, text.step, text.rows) == ("eval", 3, [{"prompt": "a", "exact": True}])


def test_a_resume_takes_up_the_files_and_undoes_later_steps(tmp_path: Path) -> None:
    first = MetricsService([JsonlSink(tmp_path)], batch_s=0.0)
    for step in range(6):
        first.record(ACTOR, step, {"reward": 0.1})
    first.record_texts("eval", 0, [{"response": "before"}])
    first.close(timeout_s=T)

    second = MetricsService(
        [JsonlSink(tmp_path)], history=read_metrics(tmp_path), texts=read_texts(tmp_path), batch_s=0.0
    )
    second.mark_resume(4)
    second.record(ACTOR, 4, {"reward": 0.2})
    second.record_texts("eval", 5, [{"response": "after"}])
    second.close(timeout_s=T)
    for records in (second.poll(0)[1], read_metrics(tmp_path)):
        rewards = {step: values["reward"] for step, values in by_step(without_undone(records), ACTOR).items()}
        assert rewards == {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1, 4: 0.2}
    assert [text.rows for text in second.texts("eval")] == [[{"response": "before"}], [{"response": "after"}]]

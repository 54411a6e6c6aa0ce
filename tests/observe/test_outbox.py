"""Records on their way to a service that may exit and start again, with real services and real files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from relax_core.observe.service import outbox as outbox_module
from relax_core.observe.service.metrics_service import MetricsService
from relax_core.observe.service.outbox import Outbox, Receipt, Refused, Undelivered
from relax_core.observe.service.records import Record, metric_record
from relax_core.observe.service.sinks import JsonlSink, read_metrics

T = 120.0


class HeldFile(JsonlSink):
    """A sink that writes while `may_write` is set. After `lost` it writes nothing, like a killed process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.may_write.set()
        self.lost = False

    def write(self, batch: Sequence[Record]) -> None:
        self.may_write.wait()
        if not self.lost:
            super().write(batch)


class Service:
    """A metrics service in ``folder`` that can be lost with all records that it had taken and not written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._service: MetricsService | None = None
        self.calls = 0
        self.start()

    def start(self) -> None:
        """Starts another process, which reads the records in the file."""
        self._number += 1
        self.file = HeldFile(self._folder)
        self._service = MetricsService([self.file], history=read_metrics(self._folder), batch_s=0.0)

    def lose(self) -> None:
        assert self._service is not None
        self.file.lost = True
        self.file.may_write.set()
        self._service.close(timeout_s=T)
        self._service = None

    def send(self, records: Sequence[Record], left_out: int) -> Receipt:
        self.calls += 1
        if self._service is None:
            raise Undelivered("the metrics actor has exited")
        return self._receipt(self._service.take(records, left_out=left_out))

    def flush(self) -> Receipt:
        assert self._service is not None
        return self._receipt(self._service.flush(timeout_s=T))

    def _receipt(self, counts: tuple[int, int]) -> Receipt:
        return Receipt(service=str(self._number), taken=counts[0], settled=counts[1])


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.fixture
def make_outbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outbox]]:
    monkeypatch.setattr(outbox_module, "RETRY_S", 0.001)
    monkeypatch.setattr(outbox_module, "LONGEST_RETRY_S", 0.001)
    made: list[Outbox] = []

    def make(send: Callable[[Sequence[Record], int], Receipt], **settings: int) -> Outbox:
        made.append(Outbox(send, **settings))
        return made[-1]

    yield make
    for outbox in made:
        outbox.end()


def put(outbox: Outbox, *steps: int) -> None:
    for step in steps:
        outbox.put(metric_record("actor", step, {"reward": 0.5}))


def steps_in(folder: Path) -> list[int]:
    return sorted(record.step for record in read_metrics(folder))


def flushed(outbox: Outbox, service: Service) -> None:
    """Flushes as the client does."""
    assert outbox.wait_sent(timeout_s=T)
    while not outbox.settle(service.flush()):
        assert outbox.wait_sent(timeout_s=T)


def test_what_is_reported_while_the_service_is_away_is_in_its_files_afterwards(
    service: Service, make_outbox: Callable[..., Outbox], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    outbox = make_outbox(service.send)
    put(outbox, 0, 1)
    flushed(outbox, service)
    service.lose()
    calls = service.calls
    put(outbox, 2, 3)
    assert not outbox.wait_sent(timeout_s=0.05)
    wait_until(lambda: service.calls > calls + 2, what="several tries")
    put(outbox, 4)
    assert "has exited" in outbox.last_error and outbox.left_out == 0
    service.start()
    flushed(outbox, service)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]


def test_what_was_taken_and_never_written_is_sent_again(
    service: Service, make_outbox: Callable[..., Outbox], tmp_path: Path
) -> None:
    """No call is open while the service changes, so only the receipt shows that another process answers."""
    outbox = make_outbox(service.send)
    put(outbox, 0)
    flushed(outbox, service)
    service.file.may_write.clear()
    put(outbox, 1, 2)
    assert outbox.wait_sent(timeout_s=T)
    service.lose()
    assert steps_in(tmp_path) == [0]
    service.start()
    put(outbox, 3)
    flushed(outbox, service)
    assert steps_in(tmp_path) == [0, 1, 2, 3]
    assert outbox.left_out == 0


def test_a_flush_that_another_process_answers_does_not_count(
    service: Service, make_outbox: Callable[..., Outbox], tmp_path: Path
) -> None:
    outbox = make_outbox(service.send)
    put(outbox, 0)
    flushed(outbox, service)
    service.file.may_write.clear()
    put(outbox, 1)
    assert outbox.wait_sent(timeout_s=T)
    service.lose()
    service.start()
    assert not outbox.settle(service.flush()), "its files lack step 1"
    flushed(outbox, service)
    assert steps_in(tmp_path) == [0, 1]


def test_a_call_under_way_while_the_service_changes_does_not_stand_for_earlier_records(
    service: Service, make_outbox: Callable[..., Outbox], tmp_path: Path
) -> None:
    """Only the lost process took the earlier record; the record of the open call went to the next process."""
    arrived, may_go = threading.Event(), threading.Event()
    may_go.set()

    def send(records: Sequence[Record], left_out: int) -> Receipt:
        arrived.set()
        may_go.wait()
        return service.send(records, left_out)

    outbox = make_outbox(send)
    service.file.may_write.clear()
    put(outbox, 0)
    assert outbox.wait_sent(timeout_s=T)
    may_go.clear()
    arrived.clear()
    put(outbox, 1)
    assert arrived.wait(T)
    service.lose()
    service.start()
    assert not outbox.settle(service.flush())
    may_go.set()
    flushed(outbox, service)
    assert steps_in(tmp_path) == [0, 1]


def test_what_is_kept_is_bounded_and_what_is_left_out_is_counted_by_the_service(
    service: Service, make_outbox: Callable[..., Outbox], tmp_path: Path
) -> None:
    counted: list[int] = []

    def send(records: Sequence[Record], left_out: int) -> Receipt:
        receipt = service.send(records, left_out)
        counted.append(left_out)
        return receipt

    outbox = make_outbox(send, kept_records=300)  # more than one call sends
    service.lose()
    put(outbox, *range(307))
    assert outbox.left_out == 7 and "300 records wait" in outbox.last_error
    service.start()
    flushed(outbox, service)
    assert steps_in(tmp_path) == list(range(300))
    assert sum(counted) == 7
    put(outbox, 400)
    flushed(outbox, service)
    assert steps_in(tmp_path)[-1] == 400 and outbox.left_out == sum(counted) == 7


def test_a_service_that_takes_no_more_ends_the_sending(make_outbox: Callable[..., Outbox]) -> None:
    refused = threading.Event()

    def send(records: Sequence[Record], left_out: int) -> Receipt:
        refused.set()
        raise Refused("a record came after the service was closed")

    outbox = make_outbox(send)
    put(outbox, 0)
    assert refused.wait(T)
    assert outbox.wait_sent(timeout_s=T), "nobody waits for it"
    assert outbox.left_out == 1 and "closed" in outbox.last_error
    put(outbox, 1)
    assert outbox.left_out == 2

"""Receives the records of all roles, keeps them in memory for the panel and the summary, and passes them to the sinks.

If a sink is slow, full, broken or hangs, only that sink loses records. No train step and no other sink waits for it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from relax_core.observe.process_usage import ProcessUsage, UsageMeter
from relax_core.observe.service.records import (
    RESUMED,
    RUN,
    HistogramRecord,
    MetricRecord,
    Record,
    TextCell,
    TextRecord,
    metric_record,
    record_key,
    text_record,
)
from relax_core.observe.service.sink_thread import SinkThread
from relax_core.observe.service.sinks import Sink

HEAD_RECORDS = 1_000  # the first records stay in memory, because a summary compares a run's end with its start
TAIL_RECORDS = 20_000  # some 10 MB
QUEUE_RECORDS = 10_000  # the number of records that may wait for one sink
KNOWN_RECORDS = 50_000  # the number of newest records whose repetition the service recognises
BATCH_S = 0.5
NOT_DELIVERED = "not delivered"  # the name, beside the sinks' names, for records that never reached the service


class MetricsHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the state of the service.

    ``problems`` holds one sentence for each problem that was not returned before. ``dropped`` maps the name of each
    sink that lacks records to their number. ``usage`` is what the service's process uses.
    """

    problems: list[str]
    dropped: dict[str, int]
    usage: ProcessUsage | None = None


class KeptRecord(NamedTuple):
    """Holds a record in a tenth of its memory; all records with the same names share one tuple of them."""

    source: str
    step: int
    time_s: float
    names: tuple[str, ...]
    values: array[float]

    def record(self) -> MetricRecord:
        """Returns the record."""
        values = dict(zip(self.names, self.values, strict=True))
        return MetricRecord(source=self.source, step=self.step, time_s=self.time_s, values=values)


class MetricsService:
    """Keeps records and passes them to the sinks.

    All methods are thread-safe. ``history`` and ``texts`` are the records of an earlier process of the same run; they
    are not written again. The first ``head_records`` and the newest ``tail_records`` records stay in memory, and for
    each kind of text the first and the newest.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        history: Iterable[MetricRecord] = (),
        texts: Sequence[TextRecord] = (),
        head_records: int = HEAD_RECORDS,
        tail_records: int = TAIL_RECORDS,
        queue_records: int = QUEUE_RECORDS,
        batch_s: float = BATCH_S,
    ) -> None:
        self._lock = threading.Lock()
        self._head_records = head_records
        self._head: list[KeptRecord] = []
        self._tail: deque[KeptRecord] = deque(maxlen=tail_records)
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._count = 0
        self._texts: dict[str, list[TextRecord]] = {}
        self._known: dict[tuple[str, int, float], None] = {}  # in order of arrival
        self._not_delivered = 0
        self._closed = False
        self._usage = UsageMeter()
        for record in history:
            self._keep(record)
        for text in texts:
            self._keep(text)
        ordered = sorted(sinks, key=lambda sink: not sink.local)
        self._sinks = [SinkThread(sink, queue_records=queue_records, batch_s=batch_s) for sink in ordered]
        self._taken = 0  # the number of records that the sinks were given

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers without waiting for a sink.

        Raises TypeError or ValueError if a value is not a number, and RuntimeError after `close`.
        """
        self.take([metric_record(source, step, values)])

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Takes texts, such as an evaluation's answers, without waiting for a sink."""
        self.take([text_record(kind, step, rows)])

    def take(self, records: Iterable[Record], *, left_out: int = 0) -> tuple[int, int]:
        """Takes records from a writer, which has left out ``left_out`` records since its last call.

        A record that was taken before, by source, step and time, is ignored, so that a writer may send records again.
        Returns the total number of records taken, and how many of them are settled (written or dropped) in every local
        sink. Raises RuntimeError after `close`.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("metrics: a record came after the service was closed")
            self._not_delivered += left_out
            for record in records:
                if record_key(record) not in self._known:
                    self._keep(record)
                    self._taken += 1
                    for sink in self._sinks:
                        sink.put(record)
            return self._taken, self._settled()

    def mark_resume(self, step: int) -> None:
        """Records that the run goes on from a checkpoint of ``step`` train steps, which undoes later records."""
        self.record(RUN, step, {RESUMED: 1.0})

    def poll(self, since: int) -> tuple[int, list[MetricRecord]]:
        """Returns the cursor for the next call, and the records after cursor ``since``; with 0, all kept records."""
        with self._lock:
            missing = max(0, self._count - since)
            newest = list(islice(reversed(self._tail), missing))[::-1]
            return self._count, [kept.record() for kept in self._head[since:] + newest]

    def texts(self, kind: str) -> list[TextRecord]:
        """Returns the first and the newest texts of ``kind``, which are none, one or two."""
        with self._lock:
            return list(self._texts.get(kind, ()))

    def health(self) -> MetricsHealth:
        """Returns the state of the sinks and of this process."""
        dropped = {sink.name: sink.dropped for sink in self._sinks} | {NOT_DELIVERED: self._not_delivered}
        return MetricsHealth(
            problems=[problem for sink in self._sinks for problem in sink.problems()],
            dropped={name: count for name, count in dropped.items() if count},
            usage=self._usage.newest(),
        )

    def flush(self, *, timeout_s: float) -> tuple[int, int]:
        """Waits until every local sink has settled all records that were taken so far.

        Returns as `take` does.

        Raises TimeoutError, which names the sink, if a local sink hangs.
        """
        deadline = time.monotonic() + timeout_s
        for sink in self._local():
            sink.flush(deadline=deadline)
        with self._lock:
            return self._taken, self._settled()

    def close(self, *, timeout_s: float) -> MetricsHealth:
        """Writes the waiting records and closes the sinks, the local ones first.

        A sink that does not end within ``timeout_s`` seconds is abandoned and reported as a problem.
        """
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:
            sink.begin_close()
        for sink in self._sinks:
            sink.join(deadline=deadline)
        return self.health()

    def _local(self) -> list[SinkThread]:
        return [sink for sink in self._sinks if sink.local]

    def _settled(self) -> int:
        return min((sink.settled for sink in self._local()), default=self._taken)

    def _keep(self, record: Record) -> None:
        self._known[record_key(record)] = None
        if len(self._known) > KNOWN_RECORDS:
            del self._known[next(iter(self._known))]
        if isinstance(record, TextRecord):
            self._texts.setdefault(record.kind, [])[1:] = [record]
        elif isinstance(record, MetricRecord):
            names = tuple(record.values)
            names = self._names.setdefault(names, names)
            numbers = array("d", record.values.values())
            kept = KeptRecord(record.source, record.step, record.time_s, names, numbers)
            if len(self._head) < self._head_records:
                self._head.append(kept)
            else:
                self._tail.append(kept)
            self._count += 1
        else:
            assert isinstance(record, HistogramRecord)  # only sinks use it; its figures are among the numbers too

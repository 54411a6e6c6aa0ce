"""Takes what the roles report, keeps it in memory for the panel and the summary, and hands it to the sinks.

A sink that is slow, full, broken or hangs costs records in that sink alone, never a train step and no other sink.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

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

HEAD_RECORDS = 1_000  # the first ones are never forgotten: a summary compares a run's end with its start
TAIL_RECORDS = 20_000  # some 40 MB
QUEUE_RECORDS = 10_000  # that wait for one sink
KNOWN_RECORDS = 50_000  # of which the service knows that it has them already
BATCH_S = 0.5
NOT_DELIVERED = "not delivered"  # stands beside the sinks' names: records that never reached the service


class MetricsHealth(msgspec.Struct, frozen=True, kw_only=True):
    """``problems``: what went wrong and was not told yet, a sentence each. ``dropped``: how many records each sink
    lacks, by its name; a sink that lacks none is not in it."""

    problems: list[str]
    dropped: dict[str, int]


class MetricsService:
    """Thread-safe. ``history`` and ``texts``: what an earlier process of the same run had kept; not written again.

    In memory stay the first ``head_records`` and the newest ``tail_records`` records, and for each kind of text the
    first and the newest.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        history: Sequence[MetricRecord] = (),
        texts: Sequence[TextRecord] = (),
        head_records: int = HEAD_RECORDS,
        tail_records: int = TAIL_RECORDS,
        queue_records: int = QUEUE_RECORDS,
        batch_s: float = BATCH_S,
    ) -> None:
        self._lock = threading.Lock()
        self._head_records = head_records
        self._head: list[MetricRecord] = []
        self._tail: deque[MetricRecord] = deque(maxlen=tail_records)
        self._count = 0
        self._texts: dict[str, list[TextRecord]] = {}
        self._known: dict[tuple[str, int, float], None] = {}  # in order of arrival
        self._not_delivered = 0
        self._closed = False
        kept: list[Record] = [*history, *texts]
        for record in kept:
            self._keep(record)
        ordered = sorted(sinks, key=lambda sink: not sink.local)
        self._sinks = [SinkThread(sink, queue_records=queue_records, batch_s=batch_s) for sink in ordered]
        self._taken = 0  # records that were handed to the sinks

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers; never waits for a sink. Raises TypeError or ValueError for what is not a number, and
        RuntimeError after `close`."""
        self.take([metric_record(source, step, values)])

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Takes texts, such as an evaluation's answers; never waits for a sink."""
        self.take([text_record(kind, step, rows)])

    def take(self, records: Iterable[Record], *, left_out: int = 0) -> tuple[int, int]:
        """Takes records that their writer made. One that is here already, by source, step and time, is ignored, so that
        a writer may send again what it had no answer for. ``left_out``: how many records the writer left out since
        its last call.

        Returns how many records were taken in all, these included, and how many of those are settled (written or
        dropped) in every local sink. Raises RuntimeError after `close`.
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
        """The run goes on from a checkpoint of ``step`` train steps: what was reported for later ones is undone."""
        self.record(RUN, step, {RESUMED: 1.0})

    def poll(self, since: int) -> tuple[int, list[MetricRecord]]:
        """Records that came after cursor ``since`` (0: all that are kept), and the cursor for the next call."""
        with self._lock:
            missing = max(0, self._count - since)
            newest = list(islice(reversed(self._tail), missing))[::-1]
            return self._count, self._head[since:] + newest

    def texts(self, kind: str) -> list[TextRecord]:
        """The first and the newest texts of ``kind``: none, one or two."""
        with self._lock:
            return list(self._texts.get(kind, ()))

    def health(self) -> MetricsHealth:
        """How the sinks are doing; see `MetricsHealth`."""
        dropped = {sink.name: sink.dropped for sink in self._sinks} | {NOT_DELIVERED: self._not_delivered}
        return MetricsHealth(
            problems=[problem for sink in self._sinks for problem in sink.problems()],
            dropped={name: count for name, count in dropped.items() if count},
        )

    def flush(self, *, timeout_s: float) -> tuple[int, int]:
        """Waits until every local sink has what was taken so far, and looks at no other sink. Returns as `take` does.
        Raises TimeoutError, which names the sink, where one hangs."""
        deadline = time.monotonic() + timeout_s
        for sink in self._local():
            sink.flush(deadline=deadline)
        with self._lock:
            return self._taken, self._settled()

    def close(self, *, timeout_s: float) -> MetricsHealth:
        """Writes what waits and closes the sinks, the local ones first. One that takes longer is left to itself, which
        is one of the problems."""
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
            if len(self._head) < self._head_records:
                self._head.append(record)
            else:
                self._tail.append(record)
            self._count += 1
        else:
            assert isinstance(record, HistogramRecord)  # a picture for the sinks: its figures are among the numbers

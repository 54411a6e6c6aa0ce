"""Takes what the roles report, keeps it in memory for the panel and the summary, writes it out beside the run's path.

A disk that is slow or full costs lines in a file, never a train step: the caller only appends to a list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from relax_core.observe.records import RESUMED, RUN, MetricRecord, TextCell, TextRecord
from relax_core.observe.sinks import Record, Sink

HEAD_RECORDS = 1_000  # the first ones are never forgotten: a summary compares a run's end with its start
TAIL_RECORDS = 20_000  # some 40 MB
QUEUE_RECORDS = 10_000
BATCH_S = 0.5


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
        self._sinks = list(sinks)
        self._head_records = head_records
        self._queue_records = queue_records
        self._batch_s = batch_s
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._head: list[MetricRecord] = []
        self._tail: deque[MetricRecord] = deque(maxlen=tail_records)
        self._count = 0
        self._texts: dict[str, list[TextRecord]] = {}
        self._pending: list[Record] = []
        self._problems: list[str] = []
        self._skipped = 0
        self._lost = {sink.name: 0 for sink in self._sinks}
        self._writing = ""
        self._taken = self._written = 0  # records that sinks get; those that every sink got
        self._flushing = self._closing = False
        for record in history:
            self._keep(record)
        for text in texts:
            self._keep_text(text)
        self._thread = threading.Thread(target=self._write_loop, name="metrics-writer", daemon=True)
        self._thread.start()

    def record(self, source: str, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers; never waits for a disk. Raises TypeError or ValueError for what is not a number, and
        RuntimeError after `close`."""
        numbers = {name: float(value) for name, value in values.items()}
        record = MetricRecord(source=source, step=step, time_s=time.time(), values=numbers)
        with self._lock:
            self._keep(record)
            self._enqueue(record)

    def record_texts(self, kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> None:
        """Takes texts, such as an evaluation's answers; never waits for a disk."""
        record = TextRecord(kind=kind, step=step, time_s=time.time(), rows=[dict(row) for row in rows])
        with self._lock:
            self._keep_text(record)
            self._enqueue(record)

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

    def problems(self) -> list[str]:
        """What went wrong since the last call; every trouble is told once, not once a record."""
        with self._lock:
            problems, self._problems = self._problems, []
            return problems

    def flush(self, *, timeout_s: float) -> None:
        """Waits until every sink got what was taken so far. Raises TimeoutError, naming the sink, when one hangs."""
        with self._wake:
            upto, self._flushing = self._taken, True
            self._wake.notify_all()
            if not self._wake.wait_for(lambda: self._written >= upto, timeout_s):
                raise TimeoutError(f"metrics: {self._writing} did not take its records within {timeout_s:g} s")

    def close(self, *, timeout_s: float) -> None:
        """Writes what is pending and closes the sinks. Raises TimeoutError, naming the sink, when one hangs."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"metrics: {self._writing} did not take its records within {timeout_s:g} s")

    def _keep(self, record: MetricRecord) -> None:
        if len(self._head) < self._head_records:
            self._head.append(record)
        else:
            self._tail.append(record)
        self._count += 1

    def _keep_text(self, record: TextRecord) -> None:
        kept = self._texts.setdefault(record.kind, [])
        kept[1:] = [record]

    def _enqueue(self, record: Record) -> None:
        if self._closing:
            raise RuntimeError("metrics: a record came after the service was closed")
        if not self._sinks:
            return
        if len(self._pending) < self._queue_records:
            self._pending.append(record)
            self._taken += 1
            self._wake.notify_all()
            return
        self._skipped += 1
        if self._skipped == 1:
            self._problems.append(
                f"metrics: {self._writing} is too slow, {self._queue_records} records wait for it; "
                "newer ones are left out of the files until it catches up"
            )

    def _write_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closing)
                batch, self._pending, self._flushing = self._pending, [], False
            if not batch:
                break
            for sink in self._sinks:
                self._write(sink, batch)
            with self._wake:
                self._written += len(batch)
                self._wake.notify_all()
                # What comes meanwhile goes out in one write.
                self._wake.wait_for(lambda: self._flushing or self._closing, self._batch_s)
        for sink in self._sinks:
            self._close(sink)

    def _write(self, sink: Sink, batch: Sequence[Record]) -> None:
        self._writing = sink.name
        try:
            sink.write(batch)
        except OSError as error:
            with self._lock:
                if self._lost[sink.name] == 0:
                    self._problems.append(
                        f"metrics: {sink.name} cannot be written: {error}. The run goes on; the panel and the summary "
                        "lack nothing, the file lacks these records. Free space or mend the folder."
                    )
                self._lost[sink.name] += len(batch)

    def _close(self, sink: Sink) -> None:
        self._writing = sink.name
        try:
            sink.close()
        except OSError as error:
            with self._lock:
                self._problems.append(f"metrics: {sink.name} cannot be closed: {error}")
        with self._lock:
            missing = self._lost[sink.name] + self._skipped
            if missing:
                self._problems.append(f"metrics: {sink.name} lacks up to {missing} records")

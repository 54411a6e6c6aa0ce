"""Runs one metrics sink in a thread with a bounded queue, so that its errors and delays affect no other sink."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relax_core.observe.service.records import Record
from relax_core.observe.service.sinks import Sink

HANGS_S = 30.0  # a sink that takes longer for one batch is reported


class SinkThread:
    """Passes records to ``sink`` in batches.

    All methods are thread-safe. A record waits at most ``batch_s`` seconds for other records of its batch. While
    ``queue_records`` records wait, newer ones are dropped. ``dropped`` is the number of records that the sink will
    never receive.
    """

    def __init__(self, sink: Sink, *, queue_records: int, batch_s: float) -> None:
        self.name, self.local = sink.name, sink.local
        self.dropped = 0
        self._sink = sink
        self._queue_records, self._batch_s = queue_records, batch_s
        self._wake = threading.Condition()
        self._pending: list[Record] = []
        self._taken = self._settled = 0  # the numbers of records that were put, and that were written or dropped
        self._upto = 0  # the number of records that were put until the end of the current batch
        self._batch: list[Record] = []  # the batch that the sink is writing
        self._busy_since: float | None = None
        self._problems: list[str] = []
        self._reported: set[str] = set()
        self._flushing = self._closing = False
        self._thread = threading.Thread(target=self._main, name=f"metrics-{sink.name}", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> int:
        """Returns how many of the records were written or dropped, which happens in the order of their arrival."""
        return self._settled

    def put(self, record: Record) -> None:
        """Queues a record, or drops it if the queue is full. It never waits for the sink."""
        with self._wake:
            self._taken += 1
            if len(self._pending) < self._queue_records:
                self._pending.append(record)
                self._wake.notify_all()
            else:
                self.dropped += 1
                self._report_slow()

    def flush(self, *, deadline: float) -> None:
        """Waits until all records so far are settled.

        Raises TimeoutError, which names the sink, at ``deadline`` (on the monotonic clock).
        """
        with self._wake:
            upto, self._flushing = self._taken, True
            self._wake.notify_all()
            if not self._wake.wait_for(lambda: self._settled >= upto, deadline - time.monotonic()):
                raise TimeoutError(
                    f"metrics: {self.name} did not take its {self._taken - self._settled} records in time"
                )

    def begin_close(self) -> None:
        """Asks the thread to write the waiting records, close the sink and end. Returns at once."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def join(self, *, deadline: float) -> None:
        """Waits until the thread has ended, at most until ``deadline`` (on the monotonic clock).

        A thread that takes longer is abandoned and ends with its process; the waiting records count as dropped.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            if self._thread.is_alive():
                self.dropped += len(self._batch) + len(self._pending)
                self._problems.append(f"metrics: {self.name} did not end in time and is abandoned")
            if self.dropped:
                self._problems.append(f"metrics: {self.name} lacks up to {self.dropped:,} records")

    def problems(self) -> list[str]:
        """Returns the problems since the last call. Each kind of problem is reported once, however often it occurs."""
        with self._wake:
            if self._busy_since is not None and time.monotonic() - self._busy_since > HANGS_S:
                self._report_slow()
            problems, self._problems = self._problems, []
            return problems

    def _report_slow(self) -> None:
        self._report(
            "slow",
            f"is slow or hangs: {len(self._batch) + len(self._pending):,} records wait for it, and while "
            f"{self._queue_records:,} wait newer ones are dropped. The run and every other sink go on.",
        )

    def _report(self, kind: str, problem: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._problems.append(f"metrics: {self.name} {problem}")

    def _main(self) -> None:
        while batch := self._next_batch():
            self._try(self._sink.write, batch, done="written", records=len(batch))
            if not self._pending:
                self._try(self._sink.flush, done="flushed", records=0)
            with self._wake:
                self._settled, self._busy_since, self._batch = self._upto, None, []
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._flushing or self._closing, self._batch_s)
        self._try(self._sink.close, done="closed", records=0)

    def _next_batch(self) -> list[Record]:
        """Waits for records. Returns an empty list if the sink has to be closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._closing)
            self._batch, self._pending, self._flushing = self._pending, [], False
            self._upto, self._busy_since = self._taken, time.monotonic() if self._batch else None
            return self._batch

    def _try(self, call: Callable[..., None], *given: list[Record], done: str, records: int) -> None:
        try:
            call(*given)
        except BaseException as error:  # SystemExit from a sink of a plug-in would end this thread without a report
            cause = f"{error}. Free space or repair the folder" if isinstance(error, OSError) else repr(error)
            rest = " The run goes on; this sink alone lacks these records." if records else ""
            with self._wake:
                self.dropped += records
                self._report(done, f"cannot be {done}: {cause}.{rest}")

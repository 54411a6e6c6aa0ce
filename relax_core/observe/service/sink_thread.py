"""One sink of the metrics with a thread and a bounded queue of its own, so that what it raises and how long it takes
concern no other sink and no caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relax_core.observe.service.records import Record
from relax_core.observe.service.sinks import Sink

HANGS_S = 30.0  # a sink that takes longer over one batch is told


class SinkThread:
    """Gives ``sink`` its records in batches. All methods are thread-safe.

    A record waits at most ``batch_s`` seconds for others that go out with it. While ``queue_records`` records wait,
    newer ones are dropped. ``dropped``: how many records the sink will never have.
    """

    def __init__(self, sink: Sink, *, queue_records: int, batch_s: float) -> None:
        self.name, self.local = sink.name, sink.local
        self.dropped = 0
        self._sink = sink
        self._queue_records, self._batch_s = queue_records, batch_s
        self._wake = threading.Condition()
        self._pending: list[Record] = []
        self._taken = self._settled = 0  # records that came; those of them that were written or dropped
        self._upto = 0  # where the batch under way ends
        self._batch: list[Record] = []  # that the sink is taking
        self._busy_since: float | None = None
        self._problems: list[str] = []
        self._told: set[str] = set()
        self._flushing = self._closing = False
        self._thread = threading.Thread(target=self._main, name=f"metrics-{sink.name}", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> int:
        """How many of the records that came were written or dropped, which happens in the order in which they came."""
        return self._settled

    def put(self, record: Record) -> None:
        """Takes a record, or drops it where there is no room; never waits for the sink."""
        with self._wake:
            self._taken += 1
            if len(self._pending) < self._queue_records:
                self._pending.append(record)
                self._wake.notify_all()
            else:
                self.dropped += 1
                self._tell_slow()

    def flush(self, *, deadline: float) -> None:
        """Waits until what came so far is settled. Raises TimeoutError, which names the sink, where it is not by
        ``deadline`` (on the monotonic clock)."""
        with self._wake:
            upto, self._flushing = self._taken, True
            self._wake.notify_all()
            if not self._wake.wait_for(lambda: self._settled >= upto, deadline - time.monotonic()):
                raise TimeoutError(
                    f"metrics: {self.name} did not take its {self._taken - self._settled} records in time"
                )

    def begin_close(self) -> None:
        """The thread writes what waits, closes the sink and ends; this returns at once."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def join(self, *, deadline: float) -> None:
        """Waits for that end until ``deadline``. A thread that takes longer is left to itself: it ends with its
        process, and the records that wait count as dropped."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            if self._thread.is_alive():
                self.dropped += len(self._batch) + len(self._pending)
                self._problems.append(f"metrics: {self.name} did not end in time and is left to itself")
            if self.dropped:
                self._problems.append(f"metrics: {self.name} lacks up to {self.dropped:,} records")

    def problems(self) -> list[str]:
        """What went wrong since the last call. Each kind of trouble is told once, however often it comes."""
        with self._wake:
            if self._busy_since is not None and time.monotonic() - self._busy_since > HANGS_S:
                self._tell_slow()
            problems, self._problems = self._problems, []
            return problems

    def _tell_slow(self) -> None:
        self._tell(
            "slow",
            f"is slow or hangs: {len(self._batch) + len(self._pending):,} records wait for it, and while "
            f"{self._queue_records:,} wait newer ones are dropped. The run and every other sink go on.",
        )

    def _tell(self, kind: str, words: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._problems.append(f"metrics: {self.name} {words}")

    def _main(self) -> None:
        while batch := self._next_batch():
            self._try(self._sink.write, batch, done="written", records=len(batch))
            with self._wake:
                self._settled, self._busy_since, self._batch = self._upto, None, []
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._flushing or self._closing, self._batch_s)
        self._try(self._sink.close, done="closed", records=0)

    def _next_batch(self) -> list[Record]:
        """Waits for records; none: the sink is to be closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._closing)
            self._batch, self._pending, self._flushing = self._pending, [], False
            self._upto, self._busy_since = self._taken, time.monotonic() if self._batch else None
            return self._batch

    def _try(self, call: Callable[..., None], *given: list[Record], done: str, records: int) -> None:
        try:
            call(*given)
        except BaseException as error:  # a sink may be foreign code, whose SystemExit would end this thread in silence
            cause = f"{error}. Free space or mend the folder" if isinstance(error, OSError) else repr(error)
            rest = " The run goes on; this sink alone lacks these records." if records else ""
            with self._wake:
                self.dropped += records
                self._tell(done, f"cannot be {done}: {cause}.{rest}")

"""Keeps the records that a process reports until the metrics service has written them to the run's files.

The service is another process, which may be killed and start again. Records that it had taken and not yet written, and
records that are reported meanwhile, would then be lost. So every writer keeps its own records, up to a limit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from relax_core.observe.service.records import Record

KEPT_RECORDS = 10_000  # some 20 MB
BATCH_RECORDS = 256
RETRY_S, LONGEST_RETRY_S = 0.1, 2.0


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Is the answer of the service.

    ``service`` is a name that differs for each process of the service. ``taken`` is the total number of records that it
    has taken. ``settled`` is the number of them that are written to the run's files or were dropped.
    """

    service: str
    taken: int
    settled: int


class Undelivered(Exception):
    """Says that the service does not answer, so that the records have to be sent again."""


class Refused(Exception):
    """Says that the service takes no records any more."""


class Outbox:
    """Sends records from a thread of its own, in order.

    All methods are thread-safe. ``send(records, left_out)`` sends records and the number of records that were left out
    since its last call. It returns the receipt, or raises `Undelivered` or `Refused`. While ``kept_records`` records
    are kept, newer ones are left out. ``left_out`` counts records that were left out or refused. ``last_error`` is the
    text of the newest failure.
    """

    def __init__(self, send: Callable[[Sequence[Record], int], Receipt], *, kept_records: int = KEPT_RECORDS) -> None:
        self.left_out = 0
        self.last_error = ""
        self._send = send
        self._kept_records = kept_records
        self._wake = threading.Condition()
        self._kept: deque[Record] = deque()  # the oldest first
        self._sent = 0  # the number of kept records that the service has taken
        self._calls: deque[tuple[int, int]] = deque()  # for each call: the receipt's ``taken``, and its records
        self._service = ""
        self._round = self._batch_round = 0  # how often all records had to be sent again: now, and for the batch
        self._reported_left_out = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def put(self, *records: Record) -> None:
        """Takes records and returns at once."""
        with self._wake:
            room = 0 if self._ended else max(0, self._kept_records - len(self._kept))
            self._kept += records[:room]
            self._wake.notify_all()
            if len(records) > room:
                self.left_out += len(records) - room
                if not self._ended:
                    self.last_error = f"{self._kept_records:,} records wait for the service"
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._main, name="metrics-outbox", daemon=True)
                self._thread.start()

    def wait_sent(self, *, timeout_s: float) -> bool:
        """Waits until the service has taken all kept records. Returns False after ``timeout_s`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._sent == len(self._kept) or self._ended, timeout_s)

    def settle(self, receipt: Receipt) -> bool:
        """Drops the records that a receipt of another call than ``send`` settles.

        If the receipt comes from another process of the service, it returns False and the records are sent again.
        """
        with self._wake:
            return self._settle(receipt)

    def end(self) -> None:
        """Stops sending. Records that are put later count as left out."""
        with self._wake:
            self._ended = True
            self.last_error = self.last_error or "reporting was closed"
            self._wake.notify_all()

    def _main(self) -> None:
        pause_s = RETRY_S
        while batch := self._next_batch():
            left_out = self.left_out - self._reported_left_out
            try:
                receipt = self._send(batch, left_out)
            except Undelivered as away:
                with self._wake:
                    self._send_again(str(away))
                    self._wake.wait_for(lambda: self._ended, pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            except Refused as refused:
                with self._wake:
                    self.left_out += len(self._kept) - self._sent
                    self.last_error = str(refused)
                self.end()
            else:
                pause_s = RETRY_S
                with self._wake:
                    self._reported_left_out += left_out
                    if self._batch_round == self._round and self._settle(receipt):
                        self._sent += len(batch)
                        self._calls.append((receipt.taken, len(batch)))
                        self._settle(receipt)
                    self._wake.notify_all()

    def _next_batch(self) -> list[Record]:
        """Waits for records that the service has not taken. Returns an empty list after `end`."""
        with self._wake:
            self._wake.wait_for(lambda: self._sent < len(self._kept) or self._ended)
            self._batch_round = self._round
            return [] if self._ended else list(islice(self._kept, self._sent, self._sent + BATCH_RECORDS))

    def _settle(self, receipt: Receipt) -> bool:
        if self._service not in ("", receipt.service):
            self._send_again("another process of the service answered")
            return False
        self._service = receipt.service
        while self._calls and self._calls[0][0] <= receipt.settled:
            _, records = self._calls.popleft()
            self._sent -= records
            for _ in range(records):
                self._kept.popleft()
        return True

    def _send_again(self, cause: str) -> None:
        self.last_error = cause
        self._sent, self._service, self._round = 0, "", self._round + 1
        self._calls.clear()
        self._wake.notify_all()

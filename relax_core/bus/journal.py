"""The ledger's events on disk: one thread appends them to SQLite in batches, off the bus's path."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from relax_core.contracts.bus import BusTimeout

GATHER_S = 0.2  # how long the thread gathers events before it writes them

_COLUMNS = "id, event, uid, group_uid, step, version, reason, time"
_FIELDS = "event TEXT, uid TEXT, group_uid TEXT, step INTEGER, version INTEGER, reason TEXT, time REAL"
_TABLES = f"""
    CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, {_FIELDS});
    CREATE TABLE IF NOT EXISTS rolled_back (id INTEGER, {_FIELDS});
"""


class LedgerUnwritable(RuntimeError):
    """The ledger's file could not be written; the text names the file and the cause."""


class _Events(NamedTuple):
    first_id: int
    event: str
    group_uid: str
    uids: Sequence[str]
    step: int | None
    versions: Sequence[int | None] | None
    version: int | None
    reason: str
    time: float

    def rows(self) -> Iterator[tuple[object, ...]]:
        versions = self.versions if self.versions is not None else repeat(self.version)
        for number, (uid, version) in enumerate(zip(self.uids, versions, strict=False)):
            yield (self.first_id + number, self.event, uid, self.group_uid, self.step, version, self.reason, self.time)


class _RollBack(NamedTuple):
    last_id: int


class _Flushed(NamedTuple):
    done: threading.Event


class Journal:
    """Appends to table ``events`` of ``path``. Events that a restore undid move to table ``rolled_back``.

    A failed write (disk full) stops the writing, not the bus: the next `flush` raises `LedgerUnwritable`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_TABLES)
        self.position: int = self._database.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()[0]
        self._queue: deque[_Events | _RollBack | _Flushed] = deque()
        self._pending = threading.Event()
        self._hurry = threading.Event()
        self._closed = False
        self._failure: sqlite3.Error | None = None
        self._thread = threading.Thread(target=self._write_forever, name="ledger-journal", daemon=True)
        self._thread.start()

    def append(
        self,
        event: str,
        group_uid: str,
        uids: Sequence[str],
        *,
        step: int | None = None,
        versions: Sequence[int] | None = None,
        version: int | None = None,
        reason: str = "",
    ) -> None:
        """One event for each uid; ``versions`` one a uid, or ``version`` for all. Never waits for the disk."""
        first_id = self.position + 1
        self.position += len(uids)
        self._enqueue(_Events(first_id, event, group_uid, uids, step, versions, version, reason, time.time()))

    def roll_back(self, last_id: int) -> None:
        """Sets aside every event after ``last_id``; later events get higher ids than any before."""
        self.position = max(self.position, last_id)
        self._enqueue(_RollBack(last_id))

    def flush(self, *, timeout_s: float) -> None:
        """Waits until everything appended so far is on disk. After `close` there is nothing to wait for."""
        if self._closed:
            return
        marker = _Flushed(threading.Event())
        self._enqueue(marker)
        self._hurry.set()
        if not marker.done.wait(timeout_s):
            raise BusTimeout(f"the ledger's disk writer has not caught up after {timeout_s:.1f} s at {self._path}")
        if self._failure is not None:
            raise LedgerUnwritable(
                f"the ledger could not be written to {self._path}: {self._failure}"
            ) from self._failure

    def close(self, *, timeout_s: float) -> None:
        """Writes what is left and ends the thread."""
        if self._closed:
            return
        try:
            self.flush(timeout_s=timeout_s)
        finally:
            self._closed = True
            self._hurry.set()
            self._pending.set()
            self._thread.join(timeout_s)
            self._database.close()

    def _enqueue(self, item: _Events | _RollBack | _Flushed) -> None:
        self._queue.append(item)
        if not self._pending.is_set():
            self._pending.set()

    def _write_forever(self) -> None:
        while not self._closed:
            self._pending.wait()
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            self._pending.clear()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            if self._failure is None:
                try:
                    self._write(batch)
                except sqlite3.Error as failure:
                    self._failure = failure
            for item in batch:
                if isinstance(item, _Flushed):
                    item.done.set()

    def _write(self, batch: list[_Events | _RollBack | _Flushed]) -> None:
        with self._database:
            for item in batch:
                if isinstance(item, _Events):
                    self._database.executemany(
                        f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", item.rows()
                    )
                elif isinstance(item, _RollBack):
                    self._database.execute(
                        f"INSERT INTO rolled_back SELECT {_COLUMNS} FROM events WHERE id > ?", (item.last_id,)
                    )
                    self._database.execute("DELETE FROM events WHERE id > ?", (item.last_id,))

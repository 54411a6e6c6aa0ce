"""The ledger on disk: a thread appends the events to SQLite in batches, so no call to the bus waits for the disk."""

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
from relax_core.contracts.columns import PERSISTED_COLUMNS

GATHER_S = 0.2  # the thread gathers events for this long and writes them as one batch

_COLUMNS = "id, event, uid, group_uid, step, version, reason, time"
_FIELDS = "event TEXT, uid TEXT, group_uid TEXT, step INTEGER, version INTEGER, reason TEXT, time REAL"
_GENERATED_FIELDS = ", ".join(f"{column} BLOB" for column in PERSISTED_COLUMNS)
_TABLES = f"""
    CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, {_FIELDS});
    CREATE TABLE IF NOT EXISTS rolled_back (id INTEGER, {_FIELDS});
    CREATE TABLE IF NOT EXISTS restores (id INTEGER PRIMARY KEY, back_to INTEGER);
    CREATE TABLE IF NOT EXISTS generated (id INTEGER PRIMARY KEY, {_GENERATED_FIELDS});
"""
_INSERT_GENERATED = f"INSERT INTO generated VALUES (?{', ?' * len(PERSISTED_COLUMNS)})"
_LAST_ID = (
    "SELECT IFNULL(MAX(id), 0) FROM ("
    + " UNION ALL ".join(f"SELECT MAX(id) AS id FROM {table}" for table in ("events", "rolled_back", "restores"))
    + ")"
)


class LedgerUnwritable(RuntimeError):
    """The ledger's file could not be written. The text names the file and the cause."""


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
    persisted: tuple[bytes, ...] | None

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yields one row of table ``events`` for each uid."""
        versions = self.versions if self.versions is not None else repeat(self.version)
        for number, (uid, version) in enumerate(zip(self.uids, versions, strict=False)):
            yield (self.first_id + number, self.event, uid, self.group_uid, self.step, version, self.reason, self.time)


class _RollBack(NamedTuple):
    restore_id: int
    back_to: int


class _Flushed(NamedTuple):
    done: threading.Event


class Journal:
    """Appends events to table ``events`` of the SQLite file ``path``.

    A restore moves the events that it undoes to table ``rolled_back``. A later restore to a checkpoint after them moves
    them back. Table ``generated`` has the payloads of `PERSISTED_COLUMNS` of each complete group, under the id of the
    first ``put`` event of the group.

    If a write fails (for instance because the disk is full), the thread stops writing and the bus goes on; the next
    `flush` raises `LedgerUnwritable`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_TABLES)
        fields = [row[1] for row in self._database.execute("PRAGMA table_info(generated)")]
        if fields != ["id", *PERSISTED_COLUMNS]:
            self._database.close()
            raise ValueError(
                f"{path}: an older Relax, without token trees, wrote this ledger, so a run cannot continue it. "
                "Use another run.dir."
            )
        self.position: int = self._database.execute(_LAST_ID).fetchone()[0]
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
        persisted: tuple[bytes, ...] | None = None,
    ) -> None:
        """Appends one event for each uid and never waits for the disk.

        ``versions`` has one weight version for each uid; ``version`` is one for all. ``persisted`` holds the payloads
        of `PERSISTED_COLUMNS`, which become one row of table ``generated``.
        """
        first_id = self.position + 1
        self.position += len(uids)
        self._enqueue(
            _Events(first_id, event, group_uid, uids, step, versions, version, reason, time.time(), persisted)
        )

    def roll_back(self, position: int) -> None:
        """Goes back to the events that were in force at ``position``, an earlier value of `position`.

        The restore takes an id of its own, and later events get higher ids.
        """
        self.position = max(self.position, position) + 1
        self._enqueue(_RollBack(self.position, position))

    def flush(self, *, timeout_s: float) -> None:
        """Waits until all appended events are on disk. After `close` it returns at once.

        Raises `BusTimeout` after ``timeout_s`` seconds, and `LedgerUnwritable` if a write failed.
        """
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
        """Writes the remaining events, ends the thread and closes the file."""
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
                    if item.persisted is not None:
                        self._database.execute(_INSERT_GENERATED, (item.first_id, *item.persisted))
                elif isinstance(item, _RollBack):
                    self._roll_back(item)

    def _roll_back(self, item: _RollBack) -> None:
        restores = self._database.execute("SELECT id, back_to FROM restores ORDER BY id").fetchall()
        spans = history(item.back_to, restores)
        in_force = " OR ".join(f"(id > {after} AND id <= {upto})" for after, upto in spans) or "FALSE"
        for source, target, which in (
            ("events", "rolled_back", f"NOT ({in_force})"),
            ("rolled_back", "events", in_force),
        ):
            self._database.execute(f"INSERT INTO {target} SELECT {_COLUMNS} FROM {source} WHERE {which}")
            self._database.execute(f"DELETE FROM {source} WHERE {which}")
        self._database.execute("INSERT INTO restores VALUES (?, ?)", item)


def history(position: int, restores: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ids that were in force at ``position``, as spans (after, up to), the newest first.

    ``restores`` lists (id of the restore, position that it went back to), in order. Events after a restore continue
    from the position that it went back to.
    """
    spans = []
    for restore_id, back_to in reversed(restores):
        if restore_id <= position:
            spans.append((restore_id, position))
            position = back_to
    return [*spans, (0, position)]

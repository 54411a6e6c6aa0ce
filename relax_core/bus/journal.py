"""The ledger on disk: a thread appends events to SQLite in batches, so calls to the bus do not wait for the disk.

If a disk outage or another program's lock prevents the write of a batch, the batch stays in memory and is retried.
Later events wait for it.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from relax_core.contracts.bus import BusTimeout
from relax_core.contracts.columns import PERSISTED_COLUMNS
from relax_core.contracts.outage import RETRY_S, Outage, retry_through_outage, sqlite_code

GATHER_S = 0.2  # the thread gathers events for this time and writes them as one batch
OPEN_S = 60.0  # maximum wait for an outage or a lock when the file is opened
MAX_WAITING_BYTES = 256 << 20  # the bus admits no group while more bytes of events wait for the disk
EVENT_BYTES, UID_BYTES = 512, 160  # estimated memory of an event, and of each uid in it

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
_KEEPS_CONNECTION = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)  # the file itself is intact


class LedgerUnwritable(RuntimeError):
    """Reports that the ledger's file could not be written; the text names the file and the cause."""


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

    @property
    def last_id(self) -> int:
        """Returns the id of the last row."""
        return self.first_id + len(self.uids) - 1

    def size(self) -> int:
        """Estimates the bytes in memory."""
        return EVENT_BYTES + UID_BYTES * len(self.uids) + sum(map(len, self.persisted or ()))


class _RollBack(NamedTuple):
    restore_id: int
    back_to: int

    @property
    def last_id(self) -> int:
        """Returns the id of the restore."""
        return self.restore_id

    def size(self) -> int:
        """Estimates the bytes in memory."""
        return EVENT_BYTES


class _Flushed(NamedTuple):
    done: threading.Event


class Journal:
    """Appends events to the table ``events`` of the SQLite file ``path``.

    A restore moves the events after the checkpoint to the table ``rolled_back``. A later restore to a newer checkpoint
    moves them back. The table ``generated`` has the payloads of `PERSISTED_COLUMNS` of each complete group; a row's id
    is the id of the group's first ``put`` event.

    During an outage (`relax_core.contracts.outage`), such as a full disk, events stay in memory. They are written after
    the outage. After any other SQLite error the thread stops writing, and the bus continues. The next `flush` then
    raises `LedgerUnwritable`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outage = Outage(f"the ledger {path}")
        self._given_up = threading.Event()
        self._database: sqlite3.Connection | None = None
        self._uncertain = False  # True if a failed attempt may have written the batch
        try:
            self.position: int = retry_through_outage(self._prepare, self._outage, limit_s=OPEN_S)
        except sqlite3.OperationalError as error:
            raise LedgerUnwritable(f"the ledger could not be opened at {path}: {error}") from error
        self._queue: deque[_Events | _RollBack | _Flushed] = deque()
        self._queued_bytes = 0  # only the caller's thread changes this field
        self._written_bytes = 0  # only the writer thread changes this field
        self._pending = threading.Event()
        self._hurry = threading.Event()
        self._closed = False
        self._failure: sqlite3.Error | None = None
        self._thread = threading.Thread(target=self._write_forever, name="ledger-journal", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Returns why events cannot be written, such as "database is locked since 12 s"; "" if there is no problem."""
        return self._outage.problem

    @property
    def waiting_bytes(self) -> int:
        """Estimates the memory of events that are not on disk yet, in bytes."""
        return self._queued_bytes - self._written_bytes

    @property
    def overfull(self) -> bool:
        """Returns whether so many events wait for the disk that no group may be admitted."""
        return self.waiting_bytes > MAX_WAITING_BYTES

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
        """Appends one event for each uid, without waiting for the disk.

        ``versions`` has one weight version for each uid; ``version`` applies to all uids. ``persisted`` contains the
        payloads of `PERSISTED_COLUMNS`, which become one row of the table ``generated``.
        """
        first_id = self.position + 1
        self.position += len(uids)
        self._enqueue(
            _Events(first_id, event, group_uid, uids, step, versions, version, reason, time.time(), persisted)
        )

    def roll_back(self, position: int) -> None:
        """Restores the events that were valid at ``position``, an earlier value of the attribute `position`.

        The restore gets the next id, and later events get higher ids.
        """
        self.position = max(self.position, position) + 1
        self._enqueue(_RollBack(self.position, position))

    def flush(self, *, timeout_s: float) -> None:
        """Waits until all appended events are on disk. After `close` it returns at once.

        Raises `LedgerUnwritable` if a write failed. After ``timeout_s`` seconds it raises `LedgerUnwritable` with the
        cause of an outage, or `BusTimeout` if there is no outage.
        """
        if self._closed:
            return
        marker = _Flushed(threading.Event())
        self._enqueue(marker)
        self._hurry.set()
        if not marker.done.wait(timeout_s):
            if problem := self.problem:
                raise LedgerUnwritable(f"the ledger could not be written to {self._path}: {problem}")
            raise BusTimeout(f"the ledger's disk writer has not caught up after {timeout_s:.1f} s at {self._path}")
        if self._failure is not None:
            raise LedgerUnwritable(
                f"the ledger could not be written to {self._path}: {self._failure}"
            ) from self._failure

    def close(self, *, timeout_s: float) -> None:
        """Writes the remaining events, ends the thread and closes the file.

        During an outage, ``timeout_s`` counts from the start of the outage, but the write is tried at least twice.
        """
        if self._closed:
            return
        timeout_s = min(timeout_s, max(2 * RETRY_S, timeout_s - self._outage.seconds))
        try:
            self.flush(timeout_s=timeout_s)
        finally:
            self._closed = True
            self._given_up.set()
            self._hurry.set()
            self._pending.set()
            self._thread.join(timeout_s)
            self._disconnect()

    def _enqueue(self, item: _Events | _RollBack | _Flushed) -> None:
        self._queue.append(item)
        if not isinstance(item, _Flushed):
            self._queued_bytes += item.size()
        if not self._pending.is_set():
            self._pending.set()

    def _write_forever(self) -> None:
        while not self._closed:
            self._pending.wait()
            self._hurry.wait(GATHER_S)
            self._hurry.clear()
            self._pending.clear()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            items = [item for item in batch if not isinstance(item, _Flushed)]
            if self._failure is None and items:
                try:
                    retry_through_outage(
                        partial(self._write_once, items), self._outage, limit_s=math.inf, given_up=self._given_up
                    )
                except sqlite3.Error as failure:
                    self._failure = failure
            self._written_bytes += sum(item.size() for item in items)
            for item in batch:
                if isinstance(item, _Flushed):
                    item.done.set()

    def _write_once(self, batch: Sequence[_Events | _RollBack]) -> None:
        """Writes a batch unless an earlier attempt has written it. Such an attempt may fail after its commit."""
        try:
            database = self._connection()
            if not (self._uncertain and database.execute(_LAST_ID).fetchone()[0] >= batch[-1].last_id):
                self._write(database, batch)
            self._uncertain = False
        except sqlite3.OperationalError as error:
            self._uncertain = True
            if sqlite_code(error) not in _KEEPS_CONNECTION:
                self._disconnect()
            raise

    def _write(self, database: sqlite3.Connection, batch: Sequence[_Events | _RollBack]) -> None:
        with database:
            for item in batch:
                if isinstance(item, _RollBack):
                    self._roll_back(database, item)
                    continue
                database.executemany(f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", item.rows())
                if item.persisted is not None:
                    database.execute(_INSERT_GENERATED, (item.first_id, *item.persisted))

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            # `retry_through_outage` counts the time that the connection waits for a lock.
            self._database = sqlite3.connect(self._path, timeout=RETRY_S, check_same_thread=False)
            self._database.execute("PRAGMA synchronous=NORMAL")
        return self._database

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _prepare(self) -> int:
        """Creates the file and its tables if they are missing, and returns the newest id."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            database = self._connection()
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript(_TABLES)
            fields = [row[1] for row in database.execute("PRAGMA table_info(generated)")]
            newest: int = database.execute(_LAST_ID).fetchone()[0]
        except sqlite3.Error:
            self._disconnect()
            raise
        if fields != ["id", *PERSISTED_COLUMNS]:
            self._disconnect()
            raise ValueError(
                f"{self._path}: an older Relax, without token trees, wrote this ledger, so a run cannot continue it. "
                "Use another run.dir."
            )
        return newest

    def _roll_back(self, database: sqlite3.Connection, item: _RollBack) -> None:
        restores = database.execute("SELECT id, back_to FROM restores ORDER BY id").fetchall()
        spans = history(item.back_to, restores)
        in_force = " OR ".join(f"(id > {after} AND id <= {upto})" for after, upto in spans) or "FALSE"
        for source, target, which in (
            ("events", "rolled_back", f"NOT ({in_force})"),
            ("rolled_back", "events", in_force),
        ):
            database.execute(f"INSERT INTO {target} SELECT {_COLUMNS} FROM {source} WHERE {which}")
            database.execute(f"DELETE FROM {source} WHERE {which}")
        database.execute("INSERT INTO restores VALUES (?, ?)", item)


def history(position: int, restores: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ids of the valid events at ``position`` as spans (after, up to), newest first.

    ``restores`` lists (id of the restore, restored position), in order. Events after a restore follow the restored
    position.
    """
    spans = []
    for restore_id, back_to in reversed(restores):
        if restore_id <= position:
            spans.append((restore_id, position))
            position = back_to
    return [*spans, (0, position)]

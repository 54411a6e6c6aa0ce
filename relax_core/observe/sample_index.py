"""Indexes the samples of a run in an SQLite database. The index can be rebuilt from the run's files at any time.

`SampleIndex.refresh` adds the records that were written to the files since the last call. A search reads only the
index. The run's files are opened only for the tokens of single samples.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.private_folder import private_folder
from relax_core.observe.event_log import (
    Event,
    EventReader,
    MadeRecord,
    TrainedRecord,
    event_files,
    is_resume,
    of_samples,
)

FORMAT = 4  # part of the file name, so a new format gets a new file
MAX_ROWS = 500
ENGINE_POINTS = 200
# Filter → column. A range filter NAME is used as NAME_min and NAME_max.
_EQUAL = {name: name for name in ("uid", "group", "state", "reason", "engine", "ended")} | {"group": "group_uid"}
_BETWEEN = ("step", "reward", "length", "version", "staleness")
FILTERS = (*_EQUAL, *(f"{name}_{end}" for name in _BETWEEN for end in ("min", "max")))
ORDERS = {"newest": "id DESC", "oldest": "id", "reward": "reward", "-reward": "reward DESC", "-length": "length DESC"}


class SampleIndex:
    """Indexes the samples of one run. ``path`` is the database file, or None for memory.

    All methods are thread-safe.
    """

    def __init__(self, run_dir: Path, path: Path | None) -> None:
        self._run_dir = run_dir
        if path is not None:
            private_folder(path.parent, key="XDG_CACHE_HOME")
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;")
        self._intake = SampleIntake(run_dir, self._database)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def refresh(self) -> int:
        """Adds the next records of the event log, at most a few MiB, and returns their number.

        After the last record it creates the database indices for the filters.
        """
        with self._lock:
            return self._intake.refresh()

    def share(self) -> float:
        """Returns the indexed share of the run's sample files, from 0 to 1."""
        with self._lock:
            cursor = self._intake.reader.cursor
        sizes = {name: size for name, size in event_files(self._run_dir).items() if of_samples(name)}
        return sum(cursor.get(name, 0) for name in sizes) / (sum(sizes.values()) or 1) if sizes else 1.0

    def take_ledger(self, dropped: Iterable[tuple[str, str]], *, anew: bool = False) -> None:
        """Marks samples that the bus dropped, by uid and reason.

        If a sample is not yet in the index, the mark is stored and applied when the sample is added. ``anew`` first
        discards all stored marks.
        """
        with self._lock, self._database:
            self._intake.take_ledger(dropped, anew=anew)

    def ledger_position(self) -> tuple[int, int]:
        """Returns the arguments of the last `set_ledger_position` call, or (0, 0) before the first call."""
        with self._lock:
            row = self._database.execute("SELECT position, restores FROM ledger").fetchone()
        return (0, 0) if row is None else (row["position"], row["restores"])

    def set_ledger_position(self, position: int, restores: int) -> None:
        """Stores the id of the newest ledger event that was read, and the number of the ledger's restores."""
        with self._lock, self._database:
            self._database.execute("INSERT OR REPLACE INTO ledger VALUES (0, ?, ?)", (position, restores))

    def problems(self) -> list[str]:
        """Returns one sentence for each file that became unreadable or has an invalid line."""
        with self._lock:
            return list(self._intake.reader.problems.values())

    def find(
        self,
        filters: Mapping[str, str | float],
        *,
        order: str = "newest",
        first: int = 0,
        most: int = 50,
        before: int | None = None,
    ) -> tuple[int, list[dict[str, Any]]]:
        """Returns the number of matching samples, and at most ``most`` of these samples from index ``first`` on.

        Never returns more than `MAX_ROWS` samples. A sample must match all filters. The samples are sorted by
        ``order``. With ``before``, only samples with a smaller id match.

        Raises ValueError with the valid names for an unknown filter or order.
        """
        unknown = [name for name in filters if name not in FILTERS]
        if unknown or order not in ORDERS:
            raise ValueError(f"{', '.join(unknown) or order}: filters are {', '.join(FILTERS)}; orders {list(ORDERS)}")
        where = [f"{_EQUAL[name]} = ?" if name in _EQUAL else _bound(name) for name in filters]
        values = tuple(filters.values())
        if before is not None:
            where, values = [*where, "id < ?"], (*values, before)
        condition = " AND ".join(where) or "TRUE"
        with self._lock:
            count = self._database.execute(f"SELECT COUNT(*) FROM samples WHERE {condition}", values).fetchone()[0]
            rows = self._database.execute(
                f"SELECT * FROM samples WHERE {condition} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
                (*values, min(most, MAX_ROWS), first),
            ).fetchall()
        return count, [_shown(row) for row in rows]

    def sample(self, number: int) -> dict[str, Any] | None:
        """Returns the row with this id, or None."""
        with self._lock:
            row = self._database.execute("SELECT * FROM samples WHERE id = ?", (number,)).fetchone()
        return None if row is None else _shown(row)

    def overview(self) -> dict[str, Any]:
        """Returns the sample counts by state, reason and engine, and the range of step, version and reward."""
        with self._lock:
            counts = {
                name: dict(
                    self._database.execute(
                        f"SELECT {name}, COUNT(*) FROM samples WHERE {name} != '' GROUP BY {name}"
                    ).fetchall()
                )
                for name in ("state", "reason", "engine")
            }
            ends = self._database.execute(
                "SELECT MIN(step), MAX(step), MIN(version), MAX(version), MIN(reward), MAX(reward) FROM samples"
            ).fetchone()
        names = ("step_min", "step_max", "version_min", "version_max", "reward_min", "reward_max")
        return {**counts, **dict(zip(names, ends, strict=True))}

    def staleness(self) -> dict[str, int]:
        """Returns the number of trained samples for each staleness."""
        with self._lock:
            rows = self._database.execute(
                "SELECT staleness, COUNT(*) FROM samples WHERE state = 'trained' GROUP BY staleness ORDER BY staleness"
            ).fetchall()
        return {str(row[0]): row[1] for row in rows}

    def engines(self) -> list[dict[str, Any]]:
        """Returns counts, means and tokens per second of each engine. A sample belongs to the engine of its first turn.

        The time of the run is divided into at most `ENGINE_POINTS` equal intervals. ``times`` are the ends of the
        intervals in Unix seconds. ``rates`` are the sampled tokens per second in each interval.
        """
        with self._lock:
            first, last = self._database.execute("SELECT MIN(time), MAX(time) FROM samples").fetchone()
            rows = self._database.execute(
                "SELECT engine, COUNT(*) AS samples, SUM(length) AS tokens, AVG(length) AS mean_length, "
                "AVG(reward) AS reward, MIN(time) AS first_s, MAX(time) AS last_s, MAX(version) AS version "
                "FROM samples WHERE engine != '' GROUP BY engine ORDER BY engine"
            ).fetchall()
            piece = max(1.0, ((last or 0.0) - (first or 0.0)) / ENGINE_POINTS)
            sums = self._database.execute(
                "SELECT engine, CAST((time - ?) / ? AS INTEGER) AS place, SUM(length) FROM samples "
                "WHERE engine != '' GROUP BY engine, place",
                (first, piece),
            ).fetchall()
        places = range(max((place for _, place, _ in sums), default=-1) + 1)
        of = {(engine, place): tokens / piece for engine, place, tokens in sums}
        return [
            {
                **dict(row),
                "times": [first + piece * (place + 1) for place in places],
                "rates": [of.get((row["engine"], place), 0.0) for place in places],
            }
            for row in rows
        ]


def _bound(name: str) -> str:
    column, _, end = name.rpartition("_")
    return f"{column} {'>=' if end == 'min' else '<='} ?"


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    shown = dict(row)
    shown["parts"] = msgspec.json.decode(shown["parts"])
    return shown


def every_id(
    index: SampleIndex, filters: Mapping[str, str | float], *, most: int, before: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the newest ``most`` samples that match the filters, page by page. ``before`` selects smaller ids."""
    for first in range(0, most, MAX_ROWS):
        asked = min(MAX_ROWS, most - first)
        _, rows = index.find(filters, most=asked, before=before)
        yield from rows
        if len(rows) < asked:
            return
        before = rows[-1]["id"]


KINDS = ("made", "trained", "numbers")  # "numbers" records are read only from the controller, for its resume events
_TABLES = """
    CREATE TABLE IF NOT EXISTS cursor (id INTEGER PRIMARY KEY CHECK (id = 0), files TEXT);
    CREATE TABLE IF NOT EXISTS ledger (id INTEGER PRIMARY KEY CHECK (id = 0), position INTEGER, restores INTEGER);
    CREATE TABLE IF NOT EXISTS waiting (uid TEXT PRIMARY KEY, fields BLOB);
    CREATE TABLE IF NOT EXISTS drops (uid TEXT PRIMARY KEY, reason TEXT);
    CREATE TABLE IF NOT EXISTS samples (
        id INTEGER PRIMARY KEY, uid TEXT, group_uid TEXT, state TEXT, reason TEXT, step INTEGER, reward REAL,
        length INTEGER, ended TEXT, version INTEGER, staleness INTEGER, engine TEXT, turns INTEGER, time REAL,
        trained_time REAL, parts TEXT, why TEXT, number INTEGER,
        made_file TEXT, made_offset INTEGER, made_size INTEGER,
        trained_file TEXT, trained_offset INTEGER, trained_size INTEGER, trained_first INTEGER
    );
    CREATE INDEX IF NOT EXISTS by_uid ON samples (uid);
"""
_INDICES = (  # created after the first read, because they would double its time
    "CREATE INDEX IF NOT EXISTS by_group ON samples (group_uid)",
    "CREATE INDEX IF NOT EXISTS by_step ON samples (step)",
    "CREATE INDEX IF NOT EXISTS by_reason ON samples (reason) WHERE reason != ''",
    "CREATE INDEX IF NOT EXISTS by_reward ON samples (reward)",
    "CREATE INDEX IF NOT EXISTS by_length ON samples (length)",
)
_TRAINED = (
    "UPDATE samples SET state = ?, step = ?, version = ?, staleness = ?, trained_time = ?, "
    "trained_file = ?, trained_offset = ?, trained_size = ?, trained_first = ? "
    "WHERE id = (SELECT MAX(id) FROM samples WHERE uid = ?)"
)
_DROP = "UPDATE samples SET state = 'dropped', reason = ? WHERE id = ? AND state IN ('made', 'put', 'masked')"


class SampleIntake:
    """Adds the new records of the event log in ``run_dir`` to ``database``.

    ``database`` must have no other writer.
    """

    def __init__(self, run_dir: Path, database: sqlite3.Connection) -> None:
        self._run_dir, self._database, self._indexed = run_dir, database, False
        database.executescript(_TABLES)
        self.reader = self._reader_from_cursor()

    def refresh(self) -> int:
        """Adds the next records and returns their number. Creates the database indices after the last record."""
        try:
            with self._database:
                return self._take_in(self.reader.read())
        except Exception:
            self.reader = self._reader_from_cursor()  # records missing in the database are read again
            raise

    def _reader_from_cursor(self) -> EventReader:
        row = self._database.execute("SELECT files FROM cursor").fetchone()
        cursor = {} if row is None else msgspec.json.decode(row["files"], type=dict[str, int])
        return EventReader(self._run_dir, cursor=cursor, kinds=KINDS)

    def _take_in(self, events: Sequence[Event]) -> int:
        for event in events:
            if isinstance(event, MadeRecord):
                self._add_made(event)
            elif isinstance(event, TrainedRecord):
                self._add_trained(event)
            elif is_resume(event):
                self._begin_attempt(event.step)
        if events:
            cursor = msgspec.json.encode(self.reader.cursor).decode()
            self._database.execute("INSERT OR REPLACE INTO cursor VALUES (0, ?)", (cursor,))
        elif not self._indexed:
            self._database.execute("ANALYZE")
            for statement in _INDICES:
                self._database.execute(statement)
            self._indexed = True
        return len(events)

    def take_ledger(self, dropped: Iterable[tuple[str, str]], *, anew: bool) -> None:
        """Does the work of `SampleIndex.take_ledger` in the caller's transaction."""
        if anew:
            self._database.execute("DELETE FROM drops")
        for uid, reason in dropped:
            known = self._database.execute("SELECT MAX(id) FROM samples WHERE uid = ?", (uid,)).fetchone()[0]
            if known is None:
                self._database.execute("INSERT OR REPLACE INTO drops VALUES (?, ?)", (uid, reason))
            else:
                self._database.execute(_DROP, (reason, known))

    def _begin_attempt(self, start: int) -> None:
        """Marks samples of earlier attempts as undone if they came after the first ``start`` train steps."""
        cut = self._database.execute(
            "SELECT MAX(trained_time) FROM samples WHERE step = ? AND state != 'undone'", (start - 1,)
        ).fetchone()[0]
        self._database.execute("UPDATE samples SET state = 'undone' WHERE step >= ?", (start,))
        if start == 0 or cut is not None:
            self._database.execute(
                "UPDATE samples SET state = 'undone' WHERE time > ? AND state IN ('made', 'put', 'dropped')",
                (cut or 0.0,),
            )

    def _add_made(self, record: MadeRecord) -> None:
        at = record.tokens
        rows = [
            (
                *(
                    sample.uid,
                    record.group_uid,
                    "made" if sample.version is None else "put",
                    "",
                    sample.reward,
                    sample.length,
                ),
                *(sample.ended, sample.version, sample.engine, sample.turns, record.time_s),
                *(msgspec.json.encode(sample.parts).decode(), sample.why, number, at.file, at.offset, at.size),
            )
            for number, sample in enumerate(record.samples)
        ]
        if any(self._database.execute("SELECT 1 FROM samples WHERE uid = ?", row[:1]).fetchone() for row in rows):
            self._database.executemany(
                "UPDATE samples SET state = 'undone' WHERE uid = ? AND state NOT IN ('undone', 'dropped')",
                [row[:1] for row in rows],
            )
        self._database.executemany(
            "INSERT INTO samples (uid, group_uid, state, reason, reward, length, ended, version, engine, turns, time, "
            f"parts, why, number, made_file, made_offset, made_size) VALUES ({', '.join('?' * 17)})",
            rows,
        )
        for name, column in (("waiting", "fields"), ("drops", "reason")):
            if self._database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() is None:
                continue
            for uid, *_ in rows:
                came = self._database.execute(f"DELETE FROM {name} WHERE uid = ? RETURNING {column}", (uid,)).fetchall()
                for (value,) in came:
                    if name == "waiting":
                        self._set_trained([tuple(msgspec.msgpack.decode(value))])
                    else:
                        newest = "(SELECT MAX(id) FROM samples WHERE uid = ?)"
                        self._database.execute(_DROP.replace("id = ?", f"id = {newest}"), (value, uid))

    def _add_trained(self, record: TrainedRecord) -> None:
        first, rows = 0, []
        parts = zip(record.uids, record.lengths, record.trained, record.versions, strict=True)
        for uid, length, trained, version in parts:
            state = "trained" if trained else "masked"
            at = (record.tokens.file, record.tokens.offset, record.tokens.size, first)
            rows.append((state, record.step, version, record.step - version, record.time_s, *at, uid))
            first += length
        self._set_trained(rows)

    def _set_trained(self, rows: Sequence[tuple[Any, ...]]) -> None:
        before = self._database.total_changes
        self._database.executemany(_TRAINED, rows)
        if self._database.total_changes - before == len(rows):
            return
        for row in rows:
            if not self._database.execute(_TRAINED, row).rowcount:
                fields = msgspec.msgpack.encode(row)
                self._database.execute("INSERT OR REPLACE INTO waiting VALUES (?, ?)", (row[-1], fields))

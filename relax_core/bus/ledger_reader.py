"""Reads the events of samples and their counts from a run's ledger.sqlite, also while the run writes the file."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.tree import Episode

TABLES = {"events", "rolled_back", "generated", "restores"}
BUSY_S = 10.0  # maximum wait of a read for a writer's lock
MAX_ROW_BYTES = 128 * 2**20  # limit of the rows of one query of the dashboard page
MAX_KINDS = 20  # limit of the event kinds that `event_counts` returns
AFTER_S = 60.0  # maximum delay from a step's end until the bus has recorded its samples
MAX_DROPS, MAX_LIVES, MAX_LIVES_EVENTS = 200_000, 1024, 500_000  # limits of the result of one call
_TIMES = {"issued": "issued_s", "put": "put_s", "leased": "leased_s", "trained": "ended_s", "dropped": "ended_s"}
SETTLE_S = 2.0  # time after which all ends of a group are on disk
FILTERS = ("uid", "group", "step", "reason")
_FIELD_OF = {"uid": "uid", "group": "group_uid", "step": "step", "reason": "reason"}
_EVENT = "id, event, uid, group_uid, step, version, reason, time"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds one event of a sample.

    ``time`` is in Unix seconds. ``version`` of an ``issued`` event is the oldest allowed weight version; ``version`` of
    a ``put`` or ``trained`` event is the weight version of the oldest trained token. ``undone`` is True if a resume
    rolled the event back. ``made`` is the episode of a ``put`` event.
    """

    event: str
    time: float
    step: int | None = None
    version: int | None = None
    reason: str = ""
    undone: bool = False
    made: Episode | None = None


class SampleHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Holds all events of a sample, in order.

    ``state`` is the kind of the last event that is not undone, such as "trained", "dropped" or "put", or "undone".
    """

    uid: str
    group: str
    state: str
    events: list[Event]


class SampleLife(msgspec.Struct, kw_only=True):
    """Holds the times of a sample's events in Unix seconds; None for an event outside the requested period."""

    uid: str
    group: str
    version: int | None = None
    reason: str = ""
    issued_s: float | None = None
    put_s: float | None = None
    leased_s: float | None = None
    ended_s: float | None = None


class DroppedSamples(NamedTuple):
    """Holds the samples that were dropped after an earlier position, up to ``position``, as (uid, reason).

    ``restores`` is the number of rollbacks by resumes. ``anew`` is True if ``dropped`` has all drops and replaces
    earlier results.
    """

    dropped: list[tuple[str, str]]
    position: int
    restores: int
    anew: bool


class LedgerFileCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Holds counts of samples, computed only from the events in the file.

    ``open`` counts the open samples by their last event. ``lost`` lists the uids of lost samples: all samples of a
    group end together, so a sample is lost if it is open and another sample of its group has ended. After the end of
    the run, all open samples are lost. ``trained_twice`` lists uids.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    open: dict[str, int]
    lost: list[str]
    trained_twice: list[str]


class EngineShare(msgspec.Struct, kw_only=True):
    """Counts the samples with responses that an engine finished, and the tokens of these responses.

    If another engine started a response, all its tokens count for the engine that finished the response.
    """

    samples: int = 0
    tokens: int = 0


class LedgerFile:
    """Reads a ledger file without writing to it; a context manager.

    ``seconds`` limits the time of all reads together, and ``max_bytes`` the memory of the rows of each read; None means
    no limit. A read waits up to ``busy_s`` seconds for a writer's lock. The constructor raises the errors of
    `open_untrusted_database`. The methods raise sqlite3.Error for a damaged file or after ``seconds``, and ValueError
    for too many rows.
    """

    def __init__(
        self, path: Path, *, seconds: float | None = None, max_bytes: int | None = None, busy_s: float = BUSY_S
    ) -> None:
        self._database = open_untrusted_database(path, tables=TABLES, busy_s=busy_s, seconds=seconds)
        self._max_bytes = max_bytes
        self._made: dict[int, dict[str, Episode]] = {}

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def samples(self, filters: Mapping[str, str | int]) -> list[SampleHistory]:
        """Returns the samples with an event that matches all ``filters``, in order of issue.

        The keys of ``filters`` are in `FILTERS`. Empty ``filters`` match all samples. With ``step`` or ``reason``,
        undone events do not match.
        """
        where = " AND ".join(f"{_FIELD_OF[key]} = ?" for key in filters) or "TRUE"
        values = tuple(filters.values())
        tables = ["events"] if {"step", "reason"} & filters.keys() else ["events", "rolled_back"]
        matching = " UNION ".join(f"SELECT uid FROM {table} WHERE {where}" for table in tables)
        found: dict[str, list[tuple[Any, ...]]] = {}
        rows = self._rows(
            f"WITH matching AS ({matching}) "
            f"SELECT {_EVENT}, 0 FROM events WHERE uid IN matching UNION ALL "
            f"SELECT {_EVENT}, 1 FROM rolled_back WHERE uid IN matching ORDER BY id",
            values * len(tables),
        )
        for row in rows:
            found.setdefault(row[2], []).append(row)
        return [
            self._sample_events(uid, rows)
            for uid, rows in sorted(found.items(), key=lambda item: _issue_order(item[0]))
        ]

    def _rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        return bounded_rows(self._database.execute(query, values), max_bytes=self._max_bytes)

    def _sample_events(self, uid: str, rows: list[tuple[Any, ...]]) -> SampleHistory:
        events = [
            Event(
                event=event,
                time=at,
                step=step,
                version=version,
                reason=reason,
                undone=bool(undone),
                made=self._made_of(number, uid) if event == "put" else None,
            )
            for number, event, _, _, step, version, reason, at, undone in rows
        ]
        in_force = [event.event for event in events if not event.undone]
        return SampleHistory(uid=uid, group=rows[0][3], state=in_force[-1] if in_force else "undone", events=events)

    def _made_of(self, event_id: int, uid: str) -> Episode | None:
        """Returns the episode of a ``put`` event.

        The table ``generated`` has one row per group; the row's id is the id of the group's first ``put`` event.
        """
        row = self._database.execute(
            "SELECT id, episodes FROM generated WHERE id <= ? ORDER BY id DESC LIMIT 1",
            (event_id,),
        ).fetchone()
        if row is None:
            return None
        if row[0] not in self._made:
            self._made[row[0]] = {episode.uid: episode for episode in decode_episodes(row[1])}
        return self._made[row[0]].get(uid)

    def counts(self, *, run_over: bool) -> LedgerFileCounts:
        """Counts all samples in one pass over the events.

        Set ``run_over`` after the last step of the run: open samples then count as lost.
        """
        samples: dict[str, str] = {}  # uid → kind of the last event
        trained: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        group_ended: dict[str, float] = {}
        for event, uid, group, reason, at in self._all_events():
            samples[uid] = event
            if event == "trained":
                trained[uid] += 1
                group_ended[group] = at
            elif event == "dropped":
                dropped[reason] += 1
                group_ended[group] = at
        settled = time.time() - SETTLE_S
        still_open = {uid: last for uid, last in samples.items() if last not in ("trained", "dropped")}
        lost = [uid for uid in still_open if run_over or group_ended.get(uid.rpartition(".")[0], settled) < settled]
        for uid in lost:
            del still_open[uid]
        return LedgerFileCounts(
            issued=len(samples),
            trained=len(trained),
            dropped=dict(sorted(dropped.items())),
            open=dict(sorted(Counter(still_open.values()).items())),
            lost=sorted(lost, key=_issue_order),
            trained_twice=sorted((uid for uid, times in trained.items() if times > 1), key=_issue_order),
        )

    def engine_shares(self) -> dict[str, EngineShare]:
        """Returns each engine's share of all complete groups, including groups that a resume has undone."""
        shares: defaultdict[str, EngineShare] = defaultdict(EngineShare)
        for (episodes,) in self._rows("SELECT episodes FROM generated"):
            for episode in decode_episodes(episodes):
                for engine in {turn.engine for turn in episode.turns}:
                    shares[engine].samples += 1
                for turn in episode.turns:
                    shares[turn.engine].tokens += sum(tokens for _, tokens in turn.versions)
        return dict(shares)

    def _all_events(self) -> Iterator[tuple[str, str, str, str, float]]:
        return self._rows("SELECT event, uid, group_uid, reason, time FROM events ORDER BY id")

    def event_counts(self) -> dict[str, int]:
        """Counts the events by kind, without undone events, for at most `MAX_KINDS` kinds."""
        return dict(self._rows("SELECT event, COUNT(*) FROM events GROUP BY event LIMIT ?", (MAX_KINDS,)))

    def drops(self, *, after: int, restores: int) -> DroppedSamples:
        """Returns the drops after event ``after``, or all drops if the number of rollbacks is not ``restores``."""
        now = self._database.execute("SELECT COUNT(*) FROM restores").fetchone()[0]
        after = after if now == restores else 0
        last = self._database.execute("SELECT IFNULL(MAX(id), 0) FROM events").fetchone()[0]
        last = min(last, after + MAX_DROPS)
        query = "SELECT uid, reason FROM events WHERE id > ? AND id <= ? AND event = 'dropped'"
        return DroppedSamples(
            [(uid, reason) for uid, reason in self._rows(query, (after, last))], last, now, after == 0
        )

    def lives(self, *, step: int, from_s: float, to_s: float) -> list[SampleLife]:
        """Returns the samples that ended at a train step, in order of issue.

        ``from_s`` is a time before the samples were issued, and ``to_s`` is the end of the step. Undone events are not
        read.
        """
        low, high = self._first_at(from_s), self._first_at(to_s + AFTER_S)
        rows = list(
            self._rows(
                "SELECT event, uid, group_uid, version, reason, time, step FROM events WHERE id >= ? AND id < ? "
                "ORDER BY id DESC LIMIT ?",
                (low, high, MAX_LIVES_EVENTS),
            )
        )
        wanted = {uid for event, uid, *_, at in rows if event in ("trained", "dropped") and at == step}
        found: dict[str, SampleLife] = {}
        for event, uid, group, version, reason, time_s, _ in reversed(rows):
            if uid not in wanted or event not in _TIMES:
                continue
            life = found.setdefault(uid, SampleLife(uid=uid, group=group))
            setattr(life, _TIMES[event], time_s)
            if event in ("put", "trained") and version is not None:
                life.version = version
            life.reason = reason or life.reason
        ordered = sorted(found.values(), key=lambda life: (life.issued_s or life.put_s or 0.0, len(life.uid), life.uid))
        return ordered[:MAX_LIVES]

    def _first_at(self, time_s: float) -> int:
        """Returns the id of the first event at or after a time. Events are ordered by time up to a few ms."""
        query = "SELECT IFNULL(MIN(id), 0), IFNULL(MAX(id), 0) + 1 FROM events"
        low, high = self._database.execute(query).fetchone()
        query = "SELECT id, time FROM events WHERE id >= ? ORDER BY id LIMIT 1"
        while low < high:
            middle = (low + high) // 2
            row = self._database.execute(query, (middle,)).fetchone()
            if row is None or row[1] >= time_s:
                high = middle
            else:
                low = row[0] + 1
        return int(low)

    def last_uid(self) -> str | None:
        """Returns the uid of the last issued sample; None for an empty ledger."""
        row = self._database.execute(
            "SELECT uid FROM events WHERE event = 'issued' ORDER BY group_uid DESC, id DESC LIMIT 1"
        ).fetchone()
        return row[0] if row else None

    def steps(self) -> tuple[int, int] | None:
        """Returns the first and the last train step of all events; None if no event has a step."""
        first, last = self._database.execute("SELECT MIN(step), MAX(step) FROM events").fetchone()
        return None if first is None else (first, last)

    def reasons(self) -> dict[str, int]:
        """Returns reason → number of events with this reason."""
        return dict(self._rows("SELECT reason, COUNT(*) FROM events WHERE reason != '' GROUP BY reason"))


def _issue_order(uid: str) -> tuple[str, int]:
    """Returns a key that sorts uids in order of issue."""
    group, _, number = uid.rpartition(".")
    return group, int(number)


SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")  # suffixes of SQLite's extra files next to a database
HEAP_BYTES = 256 * 2**20  # limit of SQLite's memory in this process
VALUE_BYTES = 16 * 2**20  # limit of one value in a row
ROW_BYTES = 250  # estimated memory of a row, without its long values
CHECK_OPCODES = 1000  # number of SQLite operations between two checks of the deadline
MAX_SCHEMA = 100_000  # limit of an SQL statement in bytes, including a table's CREATE statement
_FUNCTIONS = {"count", "min", "max", "ifnull"}
_LIMITS: Mapping[int, int] = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SCHEMA,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class UntrustedDatabase(sqlite3.Connection):
    """Represents a read-only connection, opened by `open_untrusted_database`."""


def open_untrusted_database(path: Path, *, tables: Set[str], busy_s: float, seconds: float | None) -> UntrustedDatabase:
    """Opens an untrusted database to read ``tables``, as immutable if no process has the database open.

    ``seconds`` limits the time of all reads together. SQLite's memory is limited to `HEAP_BYTES`. If ``seconds`` is
    None, both limits are off. A read waits up to ``busy_s`` seconds for a writer's lock. Raises FileNotFoundError for a
    missing file, and sqlite3.Error for a damaged file. Raises ValueError if the database or one of SQLite's extra files
    is not a regular file, or if an entry of ``tables`` is a view or has computed columns.
    """
    check_plain(path)
    # If no write-ahead log exists, no process has the file open. An immutable database is read without a lock file.
    immutable = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    deadline = None if seconds is None else time.monotonic() + seconds
    address = f"{path.absolute().as_uri()}?mode=ro{immutable}"
    database = sqlite3.connect(address, uri=True, timeout=busy_s, factory=UntrustedDatabase)
    try:
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        if deadline is not None:
            database.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_OPCODES)
        for setting in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            database.execute(f"PRAGMA {setting}")
        if seconds is not None:  # the heap limit applies to all databases of the process
            database.execute(f"PRAGMA hard_heap_limit={HEAP_BYTES}")
        for table in sorted(tables):
            _check_table(database, path.name, table)
        database.set_authorizer(_authorizer(tables))
    except BaseException:
        database.close()
        raise
    return database


def bounded_rows(cursor: sqlite3.Cursor, *, max_bytes: int | None) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a query. Raises ValueError as soon as the rows take more than ``max_bytes`` of memory."""
    taken = 0
    for row in cursor:
        taken += ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))
        if max_bytes is not None and taken > max_bytes:
            raise ValueError(f"the rows take more than {max_bytes} bytes; request fewer rows")
        yield row


def check_plain(path: Path) -> None:
    """Checks that a database and SQLite's extra files are regular files; raises ValueError or FileNotFoundError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path.name} is not a plain file")
    for ending in SQLITE_SUFFIXES:
        beside = path.with_name(f"{path.name}{ending}")
        try:
            mode = beside.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise ValueError(f"{beside.name} is not a plain file")


def _check_table(database: sqlite3.Connection, file: str, table: str) -> None:
    """Raises ValueError if ``table`` is missing, a view, or has computed columns."""
    found = database.execute(
        "SELECT type, rootpage, sql FROM sqlite_master WHERE name = ? COLLATE NOCASE AND type != 'index'", (table,)
    ).fetchmany(2)
    if not found:
        raise ValueError(f"{file} has no table {table}")
    kind, root, statement = found[0]
    words = str(statement).split(None, 2)[:2]
    if len(found) > 1 or kind != "table" or not root or [word.upper() for word in words] != ["CREATE", "TABLE"]:
        raise ValueError(f"{file}: {table} is not a plain table")
    columns = database.execute(f"PRAGMA table_xinfo({table})").fetchall()
    if computed := [str(column[1])[:40] for column in columns if column[6]]:
        raise ValueError(f"{file}: {table} has the computed column {computed[0]}")


def _authorizer(tables: Set[str]) -> Any:
    def allowed(action: int, first: str | None, second: str | None, _: str | None, inside: str | None) -> int:
        if inside is not None and inside not in ("matching",):  # denies views and triggers; "matching" is our WITH
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            return sqlite3.SQLITE_OK if first in (*tables, "matching") else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_OK if str(second).lower() in _FUNCTIONS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_DENY

    return allowed

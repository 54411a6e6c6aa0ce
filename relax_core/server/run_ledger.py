"""Reads the ledger of a run, without disturbing the run: drops, counts, and the lives of a train step's samples."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import msgspec

from relax_core.bus.ledger_reader import ForeignDatabase, bounded_rows, check_plain, foreign_database
from relax_core.contracts.foreign_files import shown_line
from relax_core.observe.sample_index import SampleIndex
from relax_core.server.run_folders import LOCK, MOST_LOCK, MOST_NAME, inside, open_inside

LEDGER = "ledger.sqlite"
MOST_EVENTS = 200_000
MOST_KINDS = 20  # of events that are counted apart
BUSY_S = 1.0
QUERY_S = 10.0  # for all reads of one connection
MOST_ROW_BYTES = 128 * 2**20  # of the rows of one query in memory
TIMES = {"issued": "issued_s", "put": "put_s", "leased": "leased_s", "trained": "ended_s", "dropped": "ended_s"}
AFTER_S = 60.0  # the bus records the end of a sample so long after its step at most
MOST_LIVES = 1024
MOST_LIVES_EVENTS = 500_000


def readable_ledger(run_dir: Path) -> Path | None:
    """Returns the path of the run's ledger, or None if there is none or SQLite must not open it from here.

    While a run of another host writes it on a shared disk, its write-ahead log is in that host's memory. Raises
    ValueError if it or a file of SQLite beside it is no plain file.
    """
    try:
        path = inside(run_dir, LEDGER)
    except FileNotFoundError:
        return None
    check_plain(path)
    if os.path.lexists(path.with_name(f"{LEDGER}-wal")):
        try:
            with open_inside(run_dir, LOCK) as file:
                host = file.read(MOST_LOCK).decode("utf-8", "replace").split()[-1]
        except (OSError, ValueError, IndexError):
            return None
        if host != socket.gethostname():
            return None
    return path


def connect(path: Path, *tables: str) -> ForeignDatabase:
    """Opens a database for reading these tables; `foreign_database` says what it raises."""
    return foreign_database(path, tables={*tables}, busy_s=BUSY_S, seconds=QUERY_S)


def take_drops(run_dir: Path, index: SampleIndex) -> None:
    """Gives the index what the bus dropped since the last call; after a restore it gives all of it again.

    Raises ValueError and sqlite3.Error for a ledger that is locked for too long, or that cannot be read.
    """
    path = readable_ledger(run_dir)
    if path is None:
        return
    with closing(connect(path, "events", "restores")) as database:
        restores = database.execute("SELECT COUNT(*) FROM restores").fetchone()[0]
        position, known = index.ledger_position()
        if restores != known:
            position = 0
        last = database.execute("SELECT IFNULL(MAX(id), 0) FROM events").fetchone()[0]
        last = min(last, position + MOST_EVENTS)
        query = "SELECT uid, reason FROM events WHERE id > ? AND id <= ? AND event = 'dropped'"
        rows = list(bounded_rows(database.execute(query, (position, last)), most_bytes=MOST_ROW_BYTES))
    index.take_ledger(rows, anew=position == 0)
    index.set_ledger_position(last, restores)


def event_counts(run_dir: Path) -> dict[str, int]:
    """Returns the number of events in force by kind; empty without a ledger that can be read from here.

    Raises ValueError and sqlite3.Error for a ledger that cannot be read.
    """
    path = readable_ledger(run_dir)
    if path is None:
        return {}
    with closing(connect(path, "events")) as database:
        rows = database.execute("SELECT event, COUNT(*) FROM events GROUP BY event LIMIT ?", (MOST_KINDS,))
        return {shown_line(str(kind)[:MOST_NAME]): int(count) for kind, count in bounded_rows(rows, most_bytes=None)}


class SampleLife(msgspec.Struct, kw_only=True):
    """Holds the times of a sample, in Unix seconds, None for what did not happen in the time that was looked at."""

    uid: str
    group: str
    version: int | None = None
    reason: str = ""
    issued_s: float | None = None
    put_s: float | None = None
    leased_s: float | None = None
    ended_s: float | None = None


def batch_lives(run_dir: Path, *, step: int, from_s: float, to_s: float) -> list[SampleLife]:
    """Returns the samples that ended at a train step, in the order in which they were issued.

    ``from_s`` is a time before their prompts were issued, and ``to_s`` the end of the step. Only events in force are
    read. Raises FileNotFoundError without a ledger that can be read from here, and sqlite3.Error if it is damaged.
    """
    path = readable_ledger(run_dir)
    if path is None:
        raise FileNotFoundError("This run has no ledger that can be read from this machine.")
    with closing(connect(path, "events")) as database:
        low, high = _first_at(database, from_s), _first_at(database, to_s + AFTER_S)
        found_rows = database.execute(
            "SELECT event, uid, group_uid, version, reason, time, step FROM events WHERE id >= ? AND id < ? "
            "ORDER BY id DESC LIMIT ?",
            (low, high, MOST_LIVES_EVENTS),
        )
        rows = list(bounded_rows(found_rows, most_bytes=MOST_ROW_BYTES))
    wanted = {uid for event, uid, *_, at in rows if event in ("trained", "dropped") and at == step}
    found: dict[str, SampleLife] = {}
    reasons: dict[str, str] = defaultdict(str)
    for event, uid, group, version, reason, time_s, _ in reversed(rows):
        if uid not in wanted or event not in TIMES:
            continue
        life = found.setdefault(uid, SampleLife(uid=uid, group=group))
        setattr(life, TIMES[event], time_s)
        if event in ("put", "trained") and version is not None:
            life.version = version
        reasons[uid] = reason or reasons[uid]
        life.reason = reasons[uid]
    ordered = sorted(found.values(), key=lambda life: (life.issued_s or life.put_s or 0.0, len(life.uid), life.uid))
    return ordered[:MOST_LIVES]


def _first_at(database: sqlite3.Connection, time_s: float) -> int:
    """Returns the id of the first event at or after a time; events are in order of time, but for some ms."""
    low, high = database.execute("SELECT IFNULL(MIN(id), 0), IFNULL(MAX(id), 0) + 1 FROM events").fetchone()
    while low < high:
        middle = (low + high) // 2
        row = database.execute("SELECT id, time FROM events WHERE id >= ? ORDER BY id LIMIT 1", (middle,)).fetchone()
        if row is None or row[1] >= time_s:
            high = middle
        else:
            low = row[0] + 1
    return int(low)

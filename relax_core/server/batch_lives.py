"""Reads from a run's ledger when each sample of a train step was issued, put, leased and trained."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import msgspec

from relax_core.bus.ledger.foreign_database import bounded_rows
from relax_core.server.ledger_drops import readable_ledger
from relax_core.server.sqlite_files import MOST_ROW_BYTES, connect

TIMES = {"issued": "issued_s", "put": "put_s", "leased": "leased_s", "trained": "ended_s", "dropped": "ended_s"}
AFTER_S = 60.0  # the bus records the end of a sample so long after its step at most
MOST_ROWS = 1024
MOST_EVENTS = 500_000


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
            (low, high, MOST_EVENTS),
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
    return ordered[:MOST_ROWS]


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

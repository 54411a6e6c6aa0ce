"""Takes from a run's ledger which samples the bus dropped, and counts its events, without disturbing the run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from relax_core.dashboard.sqlite_files import connect, readable_database
from relax_core.observe.samples.sample_index import SampleIndex

LEDGER = "ledger.sqlite"
MOST_EVENTS = 200_000


def readable_ledger(run_dir: Path) -> Path | None:
    """Returns the path of the run's ledger, or None if there is none or SQLite must not open it from here."""
    return readable_database(run_dir, LEDGER)


def take_drops(run_dir: Path, index: SampleIndex) -> None:
    """Gives the index what the bus dropped since the last call; after a restore it gives all of it again."""
    path = readable_ledger(run_dir)
    if path is None:
        return
    database = connect(path)
    try:
        restores = database.execute("SELECT COUNT(*) FROM restores").fetchone()[0]
        position, known = index.ledger_position()
        if restores != known:
            position = 0
        last = database.execute("SELECT IFNULL(MAX(id), 0) FROM events").fetchone()[0]
        last = min(last, position + MOST_EVENTS)
        rows = database.execute(
            "SELECT uid, reason FROM events WHERE id > ? AND id <= ? AND event = 'dropped'", (position, last)
        ).fetchall()
    except sqlite3.Error:  # it is locked for too long, or damaged: the next call tries again
        return
    finally:
        database.close()
    index.take_ledger(rows, anew=position == 0)
    index.set_ledger_position(last, restores)


def event_counts(run_dir: Path) -> dict[str, int]:
    """Returns the number of events in force by kind; empty without a readable ledger."""
    path = readable_ledger(run_dir)
    if path is None:
        return {}
    database = connect(path)
    try:
        return dict(database.execute("SELECT event, COUNT(*) FROM events GROUP BY event").fetchall())
    except sqlite3.Error:
        return {}
    finally:
        database.close()

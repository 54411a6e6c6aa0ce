"""Takes from a run's ledger which samples the bus dropped, and counts its events, without disturbing the run."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

from relax_core.dashboard.run_folders import LOCK, inside
from relax_core.observe.samples.sample_index import SampleIndex

LEDGER = "ledger.sqlite"
BUSY_S = 1.0
MOST_EVENTS = 200_000


def readable_ledger(run_dir: Path) -> Path | None:
    """Returns the ledger's file, or None if there is none or SQLite must not open it from here.

    While a run of another host writes it on a shared disk, its write-ahead log is in that host's memory.
    """
    try:
        path = inside(run_dir, LEDGER)
    except (OSError, ValueError):
        return None
    if path.with_name(f"{LEDGER}-wal").exists():
        try:
            host = inside(run_dir, LOCK).read_text(encoding="utf-8", errors="replace").split()[-1]
        except (OSError, ValueError, IndexError):
            return None
        if host != socket.gethostname():
            return None
    return path


def connect(path: Path) -> sqlite3.Connection:
    """Opens a ledger for reading, as immutable if no process has it open."""
    immutable = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True, timeout=BUSY_S)


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
    except sqlite3.Error:  # the run writes for longer than BUSY_S, or the file is damaged: the next call tries again
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

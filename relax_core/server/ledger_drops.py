"""Takes from a run's ledger which samples the bus dropped, and counts its events, without disturbing the run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from relax_core.bus.ledger.foreign_database import bounded_rows
from relax_core.contracts.shown_text import shown_line
from relax_core.observe.sample_index import SampleIndex
from relax_core.server.run_folders import MOST_NAME
from relax_core.server.sqlite_files import MOST_ROW_BYTES, connect, readable_database

LEDGER = "ledger.sqlite"
MOST_EVENTS = 200_000
MOST_KINDS = 20  # of events that are counted apart


def readable_ledger(run_dir: Path) -> Path | None:
    """Returns the path of the run's ledger, or None if there is none or SQLite must not open it from here."""
    return readable_database(run_dir, LEDGER)


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

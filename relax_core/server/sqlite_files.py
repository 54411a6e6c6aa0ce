"""Opens the SQLite files of a run for reading, without disturbing the run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from relax_core.bus.ledger.foreign_database import ForeignDatabase, check_plain, foreign_database
from relax_core.server.run_folders import LOCK, MOST_LOCK, inside, open_inside

BUSY_S = 1.0
QUERY_S = 10.0  # for all reads of one connection
MOST_ROW_BYTES = 128 * 2**20  # of the rows of one query in memory


def readable_database(run_dir: Path, name: str) -> Path | None:
    """Returns the path of a database of the run, or None if there is none or SQLite must not open it from here.

    While a run of another host writes it on a shared disk, its write-ahead log is in that host's memory. Raises
    ValueError if it or a file of SQLite beside it is no plain file.
    """
    try:
        path = inside(run_dir, name)
    except FileNotFoundError:
        return None
    check_plain(path)
    if os.path.lexists(path.with_name(f"{name}-wal")):
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

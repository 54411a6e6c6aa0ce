"""Opens the SQLite files of a run for reading, without disturbing the run."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

from relax_core.dashboard.run_folders import LOCK, inside

BUSY_S = 1.0


def readable_database(run_dir: Path, name: str) -> Path | None:
    """Returns the path of a database of the run, or None if there is none or SQLite must not open it from here.

    While a run of another host writes it on a shared disk, its write-ahead log is in that host's memory.
    """
    try:
        path = inside(run_dir, name)
    except (OSError, ValueError):
        return None
    if path.with_name(f"{name}-wal").exists():
        try:
            host = inside(run_dir, LOCK).read_text(encoding="utf-8", errors="replace").split()[-1]
        except (OSError, ValueError, IndexError):
            return None
        if host != socket.gethostname():
            return None
    return path


def connect(path: Path) -> sqlite3.Connection:
    """Opens a database for reading, as immutable if no process has it open."""
    immutable = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True, timeout=BUSY_S)

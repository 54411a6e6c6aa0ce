"""Simulates outages of a disk: a full file system, and a ledger that another program locks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

BLOCKS = (1 << 20, 4096, 1)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Keeps ``disk`` completely full while the block runs."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in BLOCKS:
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def locked(ledger: Path) -> Iterator[None]:
    """Keeps the write lock of ``ledger`` while the block runs."""
    with closing(sqlite3.connect(ledger, timeout=60, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        yield
        database.execute("ROLLBACK")

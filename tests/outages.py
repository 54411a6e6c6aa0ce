"""Makes outages of a disk: fills a small file system for a while, and locks a ledger as another program does."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

BLOCKS = (1 << 20, 4096, 1)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leaves no byte free on ``disk`` while the block runs."""
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
    """Holds the lock on ``ledger`` that every writer needs while the block runs."""
    with closing(sqlite3.connect(ledger, timeout=60, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        yield
        database.execute("ROLLBACK")

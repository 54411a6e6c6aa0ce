"""Opens SQLite files that somebody else may have made, for reading plain tables within time and memory.

A file may hold a view or a virtual table in place of a table, expressions in place of columns, or a query that never
ends. None of them is executed.
"""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

BESIDE = ("-wal", "-shm", "-journal")  # endings of the files that SQLite opens beside a database
HEAP_BYTES = 256 * 2**20  # of SQLite in this process
VALUE_BYTES = 16 * 2**20  # of one value
ROW_BYTES = 250  # about what a row of a few short values takes
CHECK_OPCODES = 1000  # operations of SQLite between two looks at the clock
MOST_SCHEMA = 100_000  # bytes of the statement that made a table
_FUNCTIONS = {"count", "min", "max", "ifnull"}
_LIMITS: Mapping[int, int] = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MOST_SCHEMA,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class ForeignDatabase(sqlite3.Connection):
    """Is a connection for reading alone; `foreign_database` makes it."""


def foreign_database(path: Path, *, tables: Set[str], busy_s: float, seconds: float | None) -> ForeignDatabase:
    """Opens a database for reading these ``tables``, as immutable if no process has it open.

    All reads together may take ``seconds``, and SQLite `HEAP_BYTES`; for None there is no limit. ``busy_s`` is how long
    a read waits for a writer's lock. Raises FileNotFoundError without the file, ValueError if it or a file of SQLite
    beside it is no plain file, or if a name is no plain table of plain columns, and sqlite3.Error for a damaged file.
    """
    check_plain(path)
    # Without a write-ahead log no process has the file open. Opened as immutable, it needs no lock file.
    immutable = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    deadline = None if seconds is None else time.monotonic() + seconds
    address = f"{path.absolute().as_uri()}?mode=ro{immutable}"
    database = sqlite3.connect(address, uri=True, timeout=busy_s, factory=ForeignDatabase)
    try:
        for limit, value in _LIMITS.items():
            database.setlimit(limit, value)
        if deadline is not None:
            database.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_OPCODES)
        for setting in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            database.execute(f"PRAGMA {setting}")
        if seconds is not None:  # it holds for every database of the process
            database.execute(f"PRAGMA hard_heap_limit={HEAP_BYTES}")
        for table in sorted(tables):
            _check_table(database, path.name, table)
        database.set_authorizer(_authorizer(tables))
    except BaseException:
        database.close()
        raise
    return database


def bounded_rows(cursor: sqlite3.Cursor, *, most_bytes: int | None) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a query. Raises ValueError once they take more than ``most_bytes`` bytes of memory."""
    taken = 0
    for row in cursor:
        taken += ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))
        if most_bytes is not None and taken > most_bytes:
            raise ValueError(f"the rows take more than {most_bytes} bytes; ask for fewer of them")
        yield row


def check_plain(path: Path) -> None:
    """Raises ValueError if a database or a file of SQLite beside it is no plain file, and FileNotFoundError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path.name} is no plain file")
    for ending in BESIDE:
        beside = path.with_name(f"{path.name}{ending}")
        try:
            mode = beside.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise ValueError(f"{beside.name} is no plain file")


def _check_table(database: sqlite3.Connection, file: str, table: str) -> None:
    """Raises ValueError unless ``table`` is a plain table without computed columns."""
    found = database.execute(
        "SELECT type, rootpage, sql FROM sqlite_master WHERE name = ? COLLATE NOCASE AND type != 'index'", (table,)
    ).fetchmany(2)
    if not found:
        raise ValueError(f"{file} has no table {table}")
    kind, root, statement = found[0]
    words = str(statement).split(None, 2)[:2]
    if len(found) > 1 or kind != "table" or not root or [word.upper() for word in words] != ["CREATE", "TABLE"]:
        raise ValueError(f"{file}: {table} is no plain table")
    columns = database.execute(f"PRAGMA table_xinfo({table})").fetchall()
    if computed := [str(column[1])[:40] for column in columns if column[6]]:
        raise ValueError(f"{file}: {table} has the computed column {computed[0]}")


def _authorizer(tables: Set[str]) -> Any:
    def allowed(action: int, first: str | None, second: str | None, _: str | None, inside: str | None) -> int:
        if inside is not None and inside not in ("matching",):  # a view or trigger of the file; ours is a WITH
            return sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            return sqlite3.SQLITE_OK if first in (*tables, "matching") else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_OK if str(second).lower() in _FUNCTIONS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_DENY

    return allowed

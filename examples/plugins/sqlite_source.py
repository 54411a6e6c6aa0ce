"""A data source that reads the rows of one table of an SQLite database."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.contracts.data import BaseDataSource, DataSourceConfig, DataSourceSpec


@dataclass(frozen=True)
class SqliteConfig(DataSourceConfig):
    database: str  # absolute path of the file, because processes have different working folders
    table: str = "rows"  # each of its columns is a key of the row


def check(config: SqliteConfig) -> None:
    if not Path(config.database).is_absolute() or not Path(config.database).is_file():
        raise ValueError(f"data.config.database={config.database}: no such file. Give its absolute path.")
    if not config.table.isidentifier():
        raise ValueError(f"data.config.table={config.table}: this is not a table's name.")


class SqliteSource(BaseDataSource):
    def __init__(self, config: SqliteConfig) -> None:
        self.table = config.table
        self.connection = sqlite3.connect(f"file:{config.database}?mode=ro", uri=True, check_same_thread=False)
        self.connection.row_factory = sqlite3.Row
        found = self.connection.execute(f"SELECT rowid FROM {self.table} ORDER BY rowid")
        self.ids = [row[0] for row in found]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        query = f"SELECT * FROM {self.table} WHERE rowid = ?"
        return dict(self.connection.execute(query, (self.ids[number],)).fetchone())

    def where(self, number: int) -> str:
        return f"table {self.table}, rowid {self.ids[number]}"


SPEC = DataSourceSpec(
    name="sqlite", summary="rows of an SQLite table", config=SqliteConfig, open=SqliteSource, check=check
)

"""Keeps an index of a run's samples in a SQLite file of its own, which is made of the run's files and can be made anew.

`SampleIndex.refresh` takes in what the files have gained since the last call. The rows answer any filter without a look
at the run's files; these are opened for the tokens of single samples.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.host.private_folder import private_folder
from relax_core.observe.samples.sample_intake import SampleIntake
from relax_core.observe.samples.sample_reader import numbers_files
from relax_core.observe.samples.sample_records import (
    SAMPLES_FOLDER,
)

FORMAT = 3  # part of the file's name: another format makes another index
MOST_ROWS = 500
ENGINE_POINTS = 200
# Filter → the condition that it sets; a filter of two ends has the names with _min and _max.
_EQUAL = {name: name for name in ("uid", "group", "state", "reason", "engine", "ended")} | {"group": "group_uid"}
_BETWEEN = ("step", "reward", "length", "version", "staleness")
FILTERS = (*_EQUAL, *(f"{name}_{end}" for name in _BETWEEN for end in ("min", "max")))
ORDERS = {"newest": "id DESC", "oldest": "id", "reward": "reward", "-reward": "reward DESC", "-length": "length DESC"}


class SampleIndex:
    """Is the index of one run's samples; ``path`` is its file, or None for memory. Its methods are thread-safe."""

    def __init__(self, run_dir: Path, path: Path | None) -> None:
        self._run_dir = run_dir
        if path is not None:
            private_folder(path.parent, key="XDG_CACHE_HOME")
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;")
        self._intake = SampleIntake(run_dir, self._database)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def refresh(self) -> int:
        """Takes in what the run's files have gained, at most some MiB, and returns the number of records.

        The records of all files are taken in order of time, so that a resume follows what it undid. Once there are no
        more, the indices for the filters are made.
        """
        with self._lock, self._database:
            return self._intake.refresh()

    def share(self) -> float:
        """Returns how much of the run's files was taken in, from 0 to 1."""
        with self._lock:
            known = {row["name"]: row["offset"] for row in self._database.execute("SELECT name, offset FROM files")}
        names = numbers_files(self._run_dir)
        sizes = sum((self._run_dir / SAMPLES_FOLDER / name).stat().st_size for name in names)
        return sum(known.get(name, 0) for name in names) / sizes if sizes else 1.0

    def take_ledger(self, dropped: Iterable[tuple[str, str]], *, anew: bool = False) -> None:
        """Marks samples that the bus dropped after they were put on it, by uid and reason.

        A sample that no file has yet is marked once it has come. With ``anew`` what was given before is void.
        """
        with self._lock, self._database:
            self._intake.take_ledger(dropped, anew=anew)

    def ledger_position(self) -> tuple[int, int]:
        """Returns what `set_ledger_position` was given last: the newest event's id, and the number of restores."""
        with self._lock:
            row = self._database.execute("SELECT position, restores FROM ledger").fetchone()
        return (0, 0) if row is None else (row["position"], row["restores"])

    def set_ledger_position(self, position: int, restores: int) -> None:
        """Records how far the events of the ledger were taken in."""
        with self._lock, self._database:
            self._database.execute("INSERT OR REPLACE INTO ledger VALUES (0, ?, ?)", (position, restores))

    def problems(self) -> list[str]:
        """Returns one sentence for each file that cannot be read on."""
        with self._lock:
            return [row[0] for row in self._database.execute("SELECT problem FROM files WHERE problem != ''")]

    def find(
        self,
        filters: Mapping[str, str | float],
        *,
        order: str = "newest",
        first: int = 0,
        most: int = 50,
        before: int | None = None,
    ) -> tuple[int, list[dict[str, Any]]]:
        """Returns how many samples fit all filters, and ``most`` of them from ``first`` on in this order.

        With ``before`` only samples with a smaller id count.

        Raises ValueError, which lists what there is, for an unknown filter or order.
        """
        unknown = [name for name in filters if name not in FILTERS]
        if unknown or order not in ORDERS:
            raise ValueError(f"{', '.join(unknown) or order}: filters are {', '.join(FILTERS)}; orders {list(ORDERS)}")
        where = [f"{_EQUAL[name]} = ?" if name in _EQUAL else _bound(name) for name in filters]
        values = tuple(filters.values())
        if before is not None:
            where, values = [*where, "id < ?"], (*values, before)
        condition = " AND ".join(where) or "TRUE"
        with self._lock:
            count = self._database.execute(f"SELECT COUNT(*) FROM samples WHERE {condition}", values).fetchone()[0]
            rows = self._database.execute(
                f"SELECT * FROM samples WHERE {condition} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
                (*values, min(most, MOST_ROWS), first),
            ).fetchall()
        return count, [_shown(row) for row in rows]

    def sample(self, number: int) -> dict[str, Any] | None:
        """Returns the row with this id, or None."""
        with self._lock:
            row = self._database.execute("SELECT * FROM samples WHERE id = ?", (number,)).fetchone()
        return None if row is None else _shown(row)

    def overview(self) -> dict[str, Any]:
        """Returns counts by state, reason and engine, and the least and largest step, version and reward."""
        with self._lock:
            counts = {
                name: dict(
                    self._database.execute(
                        f"SELECT {name}, COUNT(*) FROM samples WHERE {name} != '' GROUP BY {name}"
                    ).fetchall()
                )
                for name in ("state", "reason", "engine")
            }
            ends = self._database.execute(
                "SELECT MIN(step), MAX(step), MIN(version), MAX(version), MIN(reward), MAX(reward) FROM samples"
            ).fetchone()
        names = ("step_min", "step_max", "version_min", "version_max", "reward_min", "reward_max")
        return {**counts, **dict(zip(names, ends, strict=True))}

    def staleness(self) -> dict[str, int]:
        """Returns how many trained samples had each staleness."""
        with self._lock:
            rows = self._database.execute(
                "SELECT staleness, COUNT(*) FROM samples WHERE state = 'trained' GROUP BY staleness ORDER BY staleness"
            ).fetchall()
        return {str(row[0]): row[1] for row in rows}

    def engines(self) -> list[dict[str, Any]]:
        """Returns what each engine sampled, by the first turn of a sample: counts, means, and tokens a second in time.

        ``times`` are the ends of at most `ENGINE_POINTS` equal pieces of the run's time, in Unix seconds, and ``rates``
        the sampled tokens a second in them.
        """
        with self._lock:
            first, last = self._database.execute("SELECT MIN(time), MAX(time) FROM samples").fetchone()
            rows = self._database.execute(
                "SELECT engine, COUNT(*) AS samples, SUM(length) AS tokens, AVG(length) AS mean_length, "
                "AVG(reward) AS reward, MIN(time) AS first_s, MAX(time) AS last_s, MAX(version) AS version "
                "FROM samples WHERE engine != '' GROUP BY engine ORDER BY engine"
            ).fetchall()
            piece = max(1.0, ((last or 0.0) - (first or 0.0)) / ENGINE_POINTS)
            sums = self._database.execute(
                "SELECT engine, CAST((time - ?) / ? AS INTEGER) AS place, SUM(length) FROM samples "
                "WHERE engine != '' GROUP BY engine, place",
                (first, piece),
            ).fetchall()
        places = range(max((place for _, place, _ in sums), default=-1) + 1)
        of = {(engine, place): tokens / piece for engine, place, tokens in sums}
        return [
            {
                **dict(row),
                "times": [first + piece * (place + 1) for place in places],
                "rates": [of.get((row["engine"], place), 0.0) for place in places],
            }
            for row in rows
        ]


def _bound(name: str) -> str:
    column, _, end = name.rpartition("_")
    return f"{column} {'>=' if end == 'min' else '<='} ?"


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    shown = dict(row)
    shown["parts"] = msgspec.json.decode(shown["parts"])
    return shown


def every_id(
    index: SampleIndex, filters: Mapping[str, str | float], *, most: int, before: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the newest ``most`` samples that fit the filters, page by page; with ``before`` those with smaller ids."""
    for first in range(0, most, MOST_ROWS):
        asked = min(MOST_ROWS, most - first)
        _, rows = index.find(filters, most=asked, before=before)
        yield from rows
        if len(rows) < asked:
            return
        before = rows[-1]["id"]

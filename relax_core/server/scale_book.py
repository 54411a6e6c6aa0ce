"""Keeps what the autoscaler of a run sees and decides, and whether it is on, in ``operations.sqlite``.

The controller writes decisions, and the gateway reads them and turns the autoscaler on and off.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

import msgspec

from relax_core.server.order_book import BUSY_S, FILE

KEPT = 1000  # newest decisions that changed something

TABLES = """
CREATE TABLE IF NOT EXISTS autoscaler (number INTEGER PRIMARY KEY CHECK (number = 0), enabled INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, row TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS last_decision (number INTEGER PRIMARY KEY CHECK (number = 0), row TEXT NOT NULL);
"""


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Is what the autoscaler decided at one time, and why.

    ``at`` is a Unix time in seconds. ``engines`` is how many the run had, and ``target`` how many it is to have.
    ``wait_share`` is the share of the train steps' time in which the trainer waited for samples, ``waiting`` the mean
    number of samples that waited in engines, ``idle_share`` the share of the time in which no engine had one, and
    ``cache_share`` the mean share of the engines' caches that was taken; None while the window is not full. ``order``
    is the id of the order that it placed, "" without one.
    """

    at: float
    action: Literal["out", "in", "none"]
    reason: str
    engines: int
    target: int
    wait_share: float | None = None
    waiting: float | None = None
    idle_share: float | None = None
    cache_share: float | None = None
    order: str = ""


class ScaleBook:
    """Opens the tables of the run in ``folder``; one thread at a time may use it. ``busy_s`` is that of `OrderBook`."""

    def __init__(self, folder: Path, *, busy_s: float = BUSY_S) -> None:
        self._database = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(TABLES)
        self._database.execute(f"PRAGMA busy_timeout = {round(1000 * busy_s)}")

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def enabled(self) -> bool:
        """Says whether the autoscaler is on; it is off until somebody has turned it on."""
        row = self._database.execute("SELECT enabled FROM autoscaler").fetchone()
        return row is not None and bool(row[0])

    def enable(self, on: bool) -> None:
        """Turns the autoscaler on or off."""
        self._database.execute("INSERT OR REPLACE INTO autoscaler VALUES (0, ?)", (int(on),))

    def last(self) -> ScaleDecision | None:
        """Returns the newest decision, also one that changed nothing, or None before there was one."""
        row = self._database.execute("SELECT row FROM last_decision").fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=ScaleDecision)

    def changes(self, *, limit: int, offset: int) -> list[ScaleDecision]:
        """Returns the decisions that changed the number of engines, the newest first."""
        rows = self._database.execute(
            "SELECT row FROM decisions ORDER BY number DESC LIMIT ? OFFSET ?", (limit, offset)
        ).fetchall()
        return [msgspec.json.decode(row, type=ScaleDecision) for (row,) in rows]

    def write(self, decision: ScaleDecision) -> None:
        """Writes the newest decision; one that changed the number of engines is kept among the newest `KEPT`."""
        row = msgspec.json.encode(decision).decode()
        self._database.execute("INSERT OR REPLACE INTO last_decision VALUES (0, ?)", (row,))
        if decision.action != "none":
            self._database.execute("INSERT INTO decisions (row) VALUES (?)", (row,))
            self._database.execute(
                "DELETE FROM decisions WHERE number <= (SELECT max(number) FROM decisions) - ?", (KEPT,)
            )

"""Keeps the orders that a run gets from outside in ``operations.sqlite``, between the gateway and the controller.

The gateway adds orders and asks for their cancellation. The controller alone moves them on, and writes which engines
the run has. Each call is one transaction, so either process may be killed at any instant and no order is lost or done
twice.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = "operations.sqlite"
BUSY_S = 10.0  # how long opening the book waits for the transaction of the other process, which takes milliseconds
CONTROLLER_BUSY_S = 0.25  # how long the controller waits for a transaction of the gateway
MOST_QUEUED = 64  # open orders for engines beside a new one that may wait for them
KEPT_KEYS = 1000  # newest idempotency keys that are remembered

Kind = Literal["scale_out", "scale_in", "stop"]
State = Literal[
    "PENDING",
    "CREATING",
    "CONNECTING",
    "HEALTH_CHECKING",
    "WEIGHT_SYNCING",
    "READY",
    "ACTIVE",
    "DRAINING",
    "REMOVING",
    "STOPPING",
    "COMPLETED",
    "NOOP",
    "FAILED",
    "CANCELLED",
]
ENDED: tuple[State, ...] = ("ACTIVE", "COMPLETED", "NOOP", "FAILED", "CANCELLED")
# An engine that is taken out ends; until it has no open samples any more its leaving can be taken back.
UNCANCELLABLE: tuple[State, ...] = ("REMOVING", "STOPPING")

TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, state TEXT NOT NULL,
    engines TEXT NOT NULL DEFAULT '[]', failure TEXT NOT NULL DEFAULT '', cancel INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS states (id TEXT NOT NULL, state TEXT NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS states_of ON states (id);
CREATE TABLE IF NOT EXISTS keys (number INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, request TEXT NOT NULL,
    id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS engines (number INTEGER PRIMARY KEY, row TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS run (number INTEGER PRIMARY KEY CHECK (number = 0), row TEXT NOT NULL);
"""


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """Says when an order came into a state, as a Unix time in seconds."""

    state: State
    at: float


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Is one order.

    ``engines`` are the numbers of those that it brings in or takes out, and ``failure`` says why it failed. ``cancel``
    is True once its cancellation was asked for. ``history`` has all states, the oldest first.
    """

    id: str
    kind: Kind
    body: dict[str, Any]
    state: State
    engines: list[int]
    failure: str
    cancel: bool
    history: list[StateChange]

    @property
    def ended(self) -> bool:
        """Is True if the order changes no more."""
        return self.state in ENDED


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Is one engine that the run has or had, as the controller sees it.

    ``state`` is that of `relax_core.weights.engine_members.EngineMember`, or "left" or "failed"; ``since`` is the Unix
    time in seconds from which on it has it. ``version`` is that of its weights, -1 without any. ``from_step`` and
    ``to_step`` are the train steps that were under way when it began to serve and when it left, None before.
    ``running`` and ``waiting`` are samples, and ``cache_share`` is the share of the cache's tokens that is taken; they
    and ``tokens_per_s`` are None where they are not known.
    """

    number: int
    origin: Literal["start", "added", "external"]
    state: str
    since: float
    kind: str = ""
    url: str = ""
    version: int = -1
    restarts: int = 0
    failure: str = ""
    from_step: int | None = None
    to_step: int | None = None
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    cache_share: float | None = None

    @property
    def present(self) -> bool:
        """Is True for an engine that serves or joins."""
        return self.state in ("joining", "serving")


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """Says where the run stands; ``at`` is the Unix time in seconds of this state."""

    at: float
    step: int
    steps: int
    stopping: bool


def engine_id(number: int) -> str:
    """Returns the id of an engine, which clients use, by its number."""
    return f"engine-{number}"


class OrderRefused(Exception):
    """Says why an order is not taken; ``busy`` is the id of the order that must end first, or None."""

    def __init__(self, why: str, *, busy: str | None = None) -> None:
        super().__init__(why)
        self.busy = busy


class OrderBook:
    """Opens the orders of the run in ``folder``; one thread at a time may use it.

    A transaction waits at most ``busy_s`` seconds for one of the other process. Then, and if the file cannot be
    written, it raises sqlite3.OperationalError and has not happened.
    """

    def __init__(self, folder: Path, *, busy_s: float = BUSY_S) -> None:
        self._database = sqlite3.connect(folder / FILE, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
        self._database.executescript(TABLES)
        self._database.execute(f"PRAGMA busy_timeout = {round(1000 * busy_s)}")

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    # -- the gateway --------------------------------------------------------------------------------------------------
    def place(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        decide: Callable[[Sequence[EngineRow]], State],
        key: str | None = None,
        queues: bool = False,
    ) -> tuple[Order, bool]:
        """Adds an order and returns it with True; or returns the order that the same ``key`` has added, with False.

        ``decide`` gets the engines of the run and returns the first state, PENDING or NOOP, or raises `OrderRefused`.
        Raises `OrderRefused` if an order for engines is under way, or if ``key`` belongs to another body. An order that
        ``queues`` waits for `MOST_QUEUED` others.
        """
        request = f"{kind} {msgspec.json.encode(body, order='deterministic').decode()}"
        with self._changing() as database:
            known = database.execute("SELECT request, id FROM keys WHERE key = ?", (key,)).fetchone()
            if known is not None:
                if known[0] != request:
                    raise OrderRefused("this Idempotency-Key came with another order. Use a new key for a new order.")
                return self._known(known[1]), False
            ahead = [] if kind == "stop" else [one.id for one in self.open_orders() if one.kind != "stop"]
            if len(ahead) > (MOST_QUEUED if queues else 0):
                busy = ahead[0]
                raise OrderRefused(f"order {busy} is under way. Wait until it has ended, or cancel it.", busy=busy)
            state, name = decide(self.engines()), uuid.uuid4().hex
            database.execute(
                "INSERT INTO orders (id, kind, body, state) VALUES (?, ?, ?, ?)",
                (name, kind, msgspec.json.encode(body).decode(), state),
            )
            database.execute("INSERT INTO states VALUES (?, ?, ?)", (name, state, time.time()))
            if key is not None:
                database.execute("INSERT INTO keys (key, request, id) VALUES (?, ?, ?)", (key, request, name))
                database.execute("DELETE FROM keys WHERE number <= (SELECT max(number) FROM keys) - ?", (KEPT_KEYS,))
        return self._known(name), True

    def ask_cancel(self, name: str) -> Order:
        """Asks for the cancellation of an order and returns it; asking again changes nothing.

        Raises `OrderRefused` if the order has ended or cannot be taken back.
        """
        with self._changing() as database:
            order = self._known(name)
            if order.ended or order.state in UNCANCELLABLE:
                raise OrderRefused(f"order {name} is {order.state} and can no longer be cancelled.")
            database.execute("UPDATE orders SET cancel = 1 WHERE id = ?", (name,))
        return self._known(name)

    def cancel_many(self, kind: Kind, *, state: State | None, dry_run: bool) -> list[Order]:
        """Asks for the cancellation of the open orders of a kind, in ``state`` if it is given, and returns them.

        With ``dry_run`` nothing changes.
        """
        with self._changing() as database:
            found = [
                order
                for order in self.open_orders()
                if order.kind == kind and order.state not in UNCANCELLABLE and state in (None, order.state)
            ]
            if not dry_run:
                for order in found:
                    database.execute("UPDATE orders SET cancel = 1 WHERE id = ?", (order.id,))
        return [self._known(order.id) for order in found]

    # -- both ---------------------------------------------------------------------------------------------------------
    def order(self, name: str) -> Order | None:
        """Returns an order by its id, or None."""
        return next(iter(self._orders("WHERE id = ?", name)), None)

    def _known(self, name: str) -> Order:
        order = self.order(name)
        assert order is not None, "an order is never deleted"
        return order

    def orders(self, kind: Kind, *, state: State | None, limit: int, offset: int) -> list[Order]:
        """Returns the orders of a kind, and in ``state`` if it is given, the newest first."""
        return self._orders(
            "WHERE kind = ? AND state = coalesce(?, state) ORDER BY number DESC LIMIT ? OFFSET ?",
            kind,
            state,
            limit,
            offset,
        )

    def newest_orders(self, most: int) -> list[Order]:
        """Returns the newest orders of all kinds, the newest first, ``most`` at most."""
        return self._orders("ORDER BY number DESC LIMIT ?", most)

    def open_orders(self) -> list[Order]:
        """Returns the orders that have not ended, the oldest first."""
        return self._orders(f"WHERE state NOT IN ({', '.join('?' * len(ENDED))}) ORDER BY number", *ENDED)

    def _orders(self, where: str, *values: Any) -> list[Order]:
        columns = "id, kind, body, state, engines, failure, cancel"
        rows = self._database.execute(f"SELECT {columns} FROM orders {where}", values).fetchall()
        return [
            Order(
                id=name,
                kind=kind,
                body=msgspec.json.decode(body),
                state=state,
                engines=msgspec.json.decode(engines),
                failure=failure,
                cancel=bool(cancel),
                history=self._history(name),
            )
            for name, kind, body, state, engines, failure, cancel in rows
        ]

    def _history(self, name: str) -> list[StateChange]:
        rows = self._database.execute("SELECT state, at FROM states WHERE id = ? ORDER BY rowid", (name,))
        return [StateChange(state=state, at=at) for state, at in rows]

    def engines(self) -> list[EngineRow]:
        """Returns the engines that the run has or had in the order of their numbers."""
        rows = self._database.execute("SELECT row FROM engines ORDER BY number")
        return [msgspec.json.decode(row, type=EngineRow) for (row,) in rows]

    def newest_engine(self) -> int:
        """Returns the largest number that an engine of any row or order has, -1 without any."""
        rows = self._database.execute("SELECT number FROM engines").fetchall()
        orders = self._database.execute("SELECT engines FROM orders").fetchall()
        ordered = (number for (engines,) in orders for number in msgspec.json.decode(engines, type=list[int]))
        return max([*(number for (number,) in rows), *ordered], default=-1)

    def run(self) -> RunRow | None:
        """Returns where the run stands, or None before the controller has written it."""
        row = self._database.execute("SELECT row FROM run").fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=RunRow)

    # -- the controller -----------------------------------------------------------------------------------------------
    def move(self, order: Order, state: State, *, engines: Sequence[int] | None = None, failure: str = "") -> Order:
        """Moves an order on and returns it; nothing is written if nothing has changed."""
        own = order.engines if engines is None else list(engines)
        if (state, own, failure or order.failure) == (order.state, order.engines, order.failure):
            return order
        with self._changing() as database:
            database.execute(
                "UPDATE orders SET state = ?, engines = ?, failure = ? WHERE id = ?",
                (state, msgspec.json.encode(own).decode(), failure or order.failure, order.id),
            )
            if state != order.state:
                database.execute("INSERT INTO states VALUES (?, ?, ?)", (order.id, state, time.time()))
        return self._known(order.id)

    def write_engines(self, rows: Sequence[EngineRow]) -> None:
        """Writes the rows of these engines; those of others stay."""
        with self._changing() as database:
            database.executemany(
                "INSERT OR REPLACE INTO engines VALUES (?, ?)",
                [(row.number, msgspec.json.encode(row).decode()) for row in rows],
            )

    def write_run(self, row: RunRow) -> None:
        """Writes where the run stands."""
        with self._changing() as database:
            database.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (msgspec.json.encode(row).decode(),))

    def end_orders(self) -> None:
        """Ends what is open because the run has ended: a stop is completed, and added engines have left."""
        for order in self.open_orders():
            if order.state == "STOPPING":
                self.move(order, "COMPLETED")
            else:
                self.move(order, "FAILED", failure="the run ended before the order did")
        gone = [row for row in self.engines() if row.origin != "start" and row.state not in ("left", "failed")]
        run, now = self.run(), time.time()
        self.write_engines(
            [
                msgspec.structs.replace(
                    row, state="left", since=now, to_step=None if run is None or row.from_step is None else run.step
                )
                for row in gone
            ]
        )

"""Stores a run's orders, engines and autoscaler decisions. The controller of the run owns this store.

An order adds or removes engines or stops the run. Each change is written to the event log before it takes effect. If
the controller is killed, the next controller reads the changes. So no order is lost or executed twice. The load of
engines is only in memory.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from relax_core.observe.event_log import ORDERS, EventFile, EventReader, OrderChange
from relax_core.server.order_types import (
    UNCANCELLABLE,
    EngineRow,
    Kind,
    Order,
    Refusal,
    RunRow,
    ScaleDecision,
    State,
    StateAt,
    engine_id,
)

MAX_QUEUED = 64  # limit of queued orders for engines
MAX_ORDERS, MAX_DECISIONS = 1000, 1000  # limits of kept orders and decisions; open orders are always kept
RETRY_S = "5"  # value of Retry-After in seconds, for example while an order is in progress
_STATE_OF = ("state", "url", "last_failure", "from_step", "to_step", "restarts")  # logged fields of an engine


class _Line(msgspec.Struct, omit_defaults=True):
    """Holds one logged change. ``key`` is the Idempotency-Key of its order."""

    order: Order | None = None
    key: str = ""
    engine: EngineRow | None = None
    decision: ScaleDecision | None = None
    autoscaler: bool | None = None


_decoder = msgspec.json.Decoder(_Line)


class EngineOrderStore:
    """Stores the orders of the run in ``folder``. Its methods are thread-safe. ``lock`` makes several calls atomic.

    A method that changes the store raises OSError if the log cannot be written. Then the store is unchanged.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self._file = EventFile(folder, ORDERS)
        self._orders: dict[str, Order] = {}
        self._keys: dict[str, str] = {}  # Idempotency-Key → id of its order
        self._engines: dict[int, EngineRow] = {}
        self._decisions: list[ScaleDecision] = []
        self.last_decision: ScaleDecision | None = None
        self.autoscaler = False
        self.run: RunRow | None = None
        for event in EventReader(folder, kinds=("order",), writer=ORDERS).each():
            assert isinstance(event, OrderChange), "the reader returns only order changes"
            with suppress(ValueError):  # a line that Relax did not write
                self._remember(_decoder.decode(bytes(event.change)))

    def _write(self, line: _Line) -> None:
        """Appends a change to the log, then applies it."""
        self._file.append(OrderChange(time_s=time.time(), change=msgspec.Raw(msgspec.json.encode(line))))
        self._remember(line)

    def _remember(self, line: _Line) -> None:
        if (order := line.order) is not None:
            self._orders[order.request_id] = order
            if line.key:
                self._keys[line.key] = order.request_id
            if len(self._orders) > MAX_ORDERS and (
                old := next((ended_order for ended_order in self._orders.values() if ended_order.ended), None)
            ):
                del self._orders[old.request_id]
                self._keys = {key: name for key, name in self._keys.items() if name != old.request_id}
        if line.engine is not None:
            self._engines[line.engine.number] = line.engine
        if line.decision is not None:
            self._decisions = [*self._decisions[1 - MAX_DECISIONS :], line.decision]
        if line.autoscaler is not None:
            self.autoscaler = line.autoscaler

    # -- orders -------------------------------------------------------------------------------------------------------
    def known(self, kind: Kind, body: Mapping[str, Any], key: str | None) -> Order | None:
        """Returns the order with this Idempotency-Key, or None.

        Refuses the key if the earlier order had a different body.
        """
        with self.lock:
            order = self._orders.get(self._keys.get(key or "", ""))
            if order is not None and (order.kind, order.body) != (kind, body):
                message = "this Idempotency-Key came with another order. Use a new key for a new order."
                raise Refusal("other-body", message, key="Idempotency-Key", value=key)
            return order

    def place(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        status: State = "PENDING",
        key: str | None = None,
        queues: bool = False,
    ) -> Order:
        """Adds an order and returns it. If an earlier order has the same ``key``, returns the earlier order.

        Refuses the order while another order for engines is in progress. With ``queues``, at most `MAX_QUEUED` orders
        may wait.
        """
        with self.lock:
            if (known := self.known(kind, body, key)) is not None:
                return known
            ahead = (
                [] if kind == "stop" else [open_order for open_order in self.open_orders() if open_order.kind != "stop"]
            )
            if len(ahead) > (MAX_QUEUED if queues else 0):
                busy = ahead[0].request_id
                message = f"order {busy} is under way. Wait until it has ended, or cancel it."
                raise Refusal("order-under-way", message, headers={"Retry-After": RETRY_S}, request_id=busy)
            name, history = uuid.uuid4().hex, [StateAt(state=status, at=time.time())]
            order = Order(request_id=name, kind=kind, status=status, body=dict(body), history=history)
            self._write(_Line(order=order, key=key or ""))
            return order

    def ask_cancel(self, name: str) -> Order:
        """Requests the cancellation of an order, and returns the order. A repeated request has no effect."""
        with self.lock:
            order = self._orders[name]
            if order.ended or order.status in UNCANCELLABLE:
                message = f"order {name} is {order.status} and can no longer be cancelled."
                raise Refusal("order-ended", message, request_id=name)
            if not order.cancel_requested:
                self._write(_Line(order=replace(order, cancel_requested=True)))
            return self._orders[name]

    def cancel_many(self, kind: Kind, *, status: State | None, dry_run: bool) -> list[Order]:
        """Requests the cancellation of the open orders of a kind, and returns the orders.

        With ``status``, only orders in this state are affected. With ``dry_run``, nothing changes.
        """
        with self.lock:
            found = [
                order
                for order in self.open_orders()
                if order.kind == kind and order.status not in UNCANCELLABLE and status in (None, order.status)
            ]
            return found if dry_run else [self.ask_cancel(order.request_id) for order in found]

    def order(self, name: str) -> Order | None:
        """Returns an order by its id, or None."""
        with self.lock:
            return self._orders.get(name)

    def orders(self, kind: Kind | None = None, *, status: State | None = None) -> list[Order]:
        """Returns the orders, newest first. ``kind`` and ``status`` select orders if they are given."""
        with self.lock:
            return [
                order
                for order in reversed(self._orders.values())
                if kind in (None, order.kind) and status in (None, order.status)
            ]

    def open_orders(self) -> list[Order]:
        """Returns the orders that have not ended, oldest first."""
        with self.lock:
            return [order for order in self._orders.values() if not order.ended]

    def move(self, order: Order, status: State, *, engines: Sequence[int] | None = None, failure: str = "") -> Order:
        """Updates an order and returns it. Writes only actual changes.

        Only the controller's main thread calls this method.
        """
        with self.lock:
            known = self._orders[order.request_id]  # another thread may have requested its cancellation
            moved = replace(
                known,
                status=status,
                engine_ids=known.engine_ids if engines is None else [engine_id(engine) for engine in engines],
                failure=failure or known.failure,
                history=[*known.history, StateAt(state=status, at=time.time())]
                if status != known.status
                else known.history,
            )
            if moved != known:
                self._write(_Line(order=moved))
            return moved

    # -- engines and the run ------------------------------------------------------------------------------------------
    def engines(self) -> list[EngineRow]:
        """Returns all present and earlier engines in the order of their numbers."""
        with self.lock:
            return [self._engines[number] for number in sorted(self._engines)]

    def newest_engine(self) -> int:
        """Returns the largest engine number in all rows and orders, or -1 without engines."""
        with self.lock:
            ordered = (number for order in self._orders.values() for number in order.engines)
            return max([*self._engines, *ordered], default=-1)

    def write_engines(self, rows: Iterable[EngineRow]) -> None:
        """Updates the rows of these engines."""
        with self.lock:
            for row in rows:
                known = self._engines.get(row.number)
                if known is None or any(getattr(known, name) != getattr(row, name) for name in _STATE_OF):
                    self._write(_Line(engine=row))
                self._engines[row.number] = row

    def end_orders(self) -> None:
        """Ends the open orders of an ended run: a stop order is completed, all other orders failed.

        Added engines have left.
        """
        with self.lock:
            for order in self.open_orders():
                if order.status == "STOPPING":
                    self.move(order, "COMPLETED")
                else:
                    self.move(order, "FAILED", failure="the run ended before the order was completed")
            step, now = None if self.run is None else self.run.step, time.time()
            self.write_engines(
                replace(row, state="left", since=now, to_step=None if row.from_step is None else step)
                for row in self.engines()
                if row.origin != "start" and row.state not in ("left", "failed")
            )

    # -- the autoscaler -----------------------------------------------------------------------------------------------
    def enable_autoscaler(self, on: bool) -> None:
        """Turns the autoscaler on or off."""
        with self.lock:
            self._write(_Line(autoscaler=on))

    def decided(self, decision: ScaleDecision) -> None:
        """Stores the newest decision. Logs the decision if it changed the number of engines."""
        with self.lock:
            self.last_decision = decision
            if decision.action != "none":
                self._write(_Line(decision=decision))

    def decisions(self) -> list[ScaleDecision]:
        """Returns the decisions that changed the number of engines, newest first."""
        with self.lock:
            return self._decisions[::-1]


def order_history(run_dir: Path, *, sampled: Mapping[str, tuple[int, int]], repeatable: bool) -> dict[str, Any]:
    """Returns the fields ``engines``, ``operations`` and the fields about repeatability for summary.json.

    ``sampled`` maps engine id → (samples, tokens). An engine that is missing has sampled nothing. A repeatable run is
    no longer repeatable after an added engine has served, because answers depend on the number of engines that share
    the prompts. ``repeatable_steps`` is then the number of train steps before the first added engine served.
    """
    order_store = EngineOrderStore(run_dir)
    rows = order_store.engines()
    engines = [
        {
            "id": row.id,
            "origin": row.origin,
            "state": row.state,
            "from_step": row.from_step,
            "to_step": row.to_step,
            "samples": sampled.get(row.id, (0, 0))[0],
            "tokens": sampled.get(row.id, (0, 0))[1],
            "restarts": row.restarts,
            "last_failure": row.last_failure,
        }
        for row in rows
    ]
    left_out = ("status", "cancel_requested")
    operations = [
        {name: value for name, value in msgspec.to_builtins(order).items() if name not in left_out}
        for order in reversed(order_store.orders())
    ]
    served = [row.from_step for row in rows if row.origin != "start" and row.from_step is not None]
    steps = {"repeatable": False, "repeatable_steps": min(served)} if repeatable and served else {}
    return {"engines": engines, "operations": operations, **steps}

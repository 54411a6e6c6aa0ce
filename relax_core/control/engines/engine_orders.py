"""Executes the orders of the run's order book: engines are added and taken out, and the run is stopped.

The controller calls it a few times a second. It keeps nothing that is not in the book or in the set of engines, so
another attempt, or another controller, goes on with the orders that are open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from relax_core.control.engines.engine_changes import EngineChanges
from relax_core.control.engines.engine_set import EngineSet
from relax_core.control.health.heartbeats import Beat
from relax_core.gateway.order_book import EngineRow, Order, OrderBook, RunRow, State
from relax_core.roles.process.role_context import ENGINE, worker_name

WRITE_S = 1.0  # the longest time after which the book says where the run stands


def open_book(run_dir: Path, *, count: int, anew: bool) -> tuple[OrderBook, EngineSet]:
    """Opens the order book of a run and returns it with the engines that the book says the run has.

    ``count`` is that of the configuration. ``anew`` says that a command begins: then what an earlier one has left open
    is ended, and the run has the engines of the configuration.
    """
    book = OrderBook(run_dir)
    if anew:
        book.end_orders()
    rows = [row for row in book.engines() if row.origin == "added"]
    ordered = [number for order in book.open_orders() for number in order.engines]
    used = max([*(row.number for row in rows), *ordered], default=-1)
    engines = EngineSet(count, added=[row.number for row in rows if row.present], used=used)
    engines.failures |= {row.number: row.failure for row in rows if row.state == "failed"}
    return book, engines


class EngineOrders:
    """Moves the open orders on for one attempt of the services.

    ``changes`` and ``engines`` are those of the attempt and of the run. ``stop`` asks the run to end with a checkpoint.
    """

    def __init__(
        self, book: OrderBook, changes: EngineChanges, engines: EngineSet, *, steps: int, stop: Callable[[], None]
    ) -> None:
        self._book = book
        self._changes = changes
        self._engines = engines
        self._steps = steps
        self._stop = stop
        self._rows = {row.number: row for row in book.engines()}
        self._written = 0.0
        self._run: RunRow | None = None

    def tick(self, beats: Mapping[str, Beat], *, step: int, trained: bool, stopping: bool) -> None:
        """Moves each open order on; ``trained`` says that a train step of this start is done."""
        self._write(beats, step=step, stopping=stopping)
        for order in self._book.open_orders():
            match order.kind:
                case "stop":
                    self._tick_stop(order, trained=trained, stopping=stopping)
                case "scale_out":
                    self._tick_out(order)
                case "scale_in":
                    self._tick_in(order)

    def _tick_stop(self, order: Order, *, trained: bool, stopping: bool) -> None:
        if order.state == "STOPPING" and stopping:
            return
        if order.cancel:
            self._book.move(order, "CANCELLED")
        elif trained or stopping:
            self._book.move(order, "STOPPING")
            self._stop()

    # -- engines that come --------------------------------------------------------------------------------------------
    def _tick_out(self, order: Order) -> None:
        if order.cancel:
            self._take_back(order, "CANCELLED")
        elif order.failure:
            self._take_back(order, "FAILED")
        elif order.state == "PENDING":
            missing = int(order.body["num_replicas"]) - len(self._engines.present())
            self._follow(self._book.move(order, "CREATING", engines=self._engines.reserve(max(0, missing))))
        else:
            self._follow(order)

    def _follow(self, order: Order) -> None:
        """Writes the state of an order whose engines join; one of them that fails fails the order."""
        if failed := [number for number in order.engines if number in self._engines.failures]:
            why = "; ".join(self._engines.failures[number] for number in failed)
            kept = [number for number in order.engines if number not in failed]
            if order.body["partial"] == "rollback_all" or not kept:
                self._book.move(order, order.state, failure=why)
                return
            order = self._book.move(order, order.state, engines=kept)
        for number in set(order.engines) - set(self._engines.present()):
            self._changes.join(number)  # a new order, or a controller was killed before it had started the engine
        age_s = time.time() - order.history[0].at
        stages: list[State] = [self._changes.stage(number) for number in order.engines]
        if set(stages) <= {"ACTIVE"}:
            self._book.move(self._book.move(order, "READY"), "ACTIVE")
        elif age_s > (limit := float(order.body["timeout_secs"])):
            late = ", ".join(worker_name(ENGINE, one) for one in order.engines if self._changes.stage(one) != "ACTIVE")
            self._book.move(order, order.state, failure=f"{late} did not serve within timeout_secs={limit:g}")
        else:
            order_of: list[State] = ["CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "ACTIVE"]
            least = min(stages, key=order_of.index)
            if order_of.index(least) > order_of.index(order.state):
                self._book.move(order, least)

    def _take_back(self, order: Order, end: State) -> None:
        """Takes the engines of an order out again, and ends the order when they are gone."""
        leaving = self._changes.leaving()
        for number in set(order.engines) & set(self._engines.present()):
            self._changes.leave(number)
        if not (set(order.engines) & ({*self._engines.present(), *leaving})):
            self._book.move(order, end)

    # -- engines that go ----------------------------------------------------------------------------------------------
    def _tick_in(self, order: Order) -> None:
        if order.state == "PENDING":
            if order.cancel:
                self._book.move(order, "CANCELLED")
                return
            order = self._book.move(order, "DRAINING", engines=self._chosen(order))
        if not order.cancel:
            for number in set(order.engines) & set(self._engines.present()):
                self._changes.leave(number, at_once=bool(order.body["force"]), timeout_s=order.body["timeout_secs"])
        open_ones = set(order.engines) & set(self._changes.draining())
        if order.cancel and order.state == "DRAINING":
            for number in open_ones:
                self._changes.stay(number)
            left = [number for number in order.engines if number not in open_ones]
            self._book.move(order, "CANCELLED", engines=left)
        elif not set(order.engines) & set(self._changes.leaving()):
            self._book.move(self._book.move(order, "REMOVING"), "COMPLETED")
        elif not open_ones:
            self._book.move(order, "REMOVING")

    def _chosen(self, order: Order) -> list[int]:
        """Returns the engines that go: the named ones, or the newest ones beyond the number that stays."""
        added = [one for one in self._engines.present() if one >= self._engines.count]
        if order.body.get("engine_ids"):
            return [number for number in order.body["engine_ids"] if number in added]
        more = len(self._engines.present()) - int(order.body["num_replicas"])
        return added[max(0, len(added) - more) :] if more > 0 else []

    # -- what the book says of the run --------------------------------------------------------------------------------
    def _write(self, beats: Mapping[str, Beat], *, step: int, stopping: bool) -> None:
        """Writes changes of the engines' states at once, and everything else once a second if it has changed."""
        now = time.time()
        rows = {member.number: self._row(member.number, member.state, beats, now) for member in self._engines.members()}
        for number, row in self._rows.items():
            if number not in rows:
                failure = self._engines.failures.get(number, "")
                state = "failed" if failure else "left"
                since = row.since if row.state == state else now
                rows[number] = msgspec.structs.replace(row, state=state, since=since, failure=failure)
        moved = any(number not in self._rows or self._rows[number].state != row.state for number, row in rows.items())
        if not moved and now - self._written < WRITE_S:
            return
        self._written = now
        if changed := [row for number, row in rows.items() if row != self._rows.get(number)]:
            self._book.write_engines(changed)
        self._rows = rows
        run = RunRow(at=now, step=step, steps=self._steps, stopping=stopping)
        if self._run is None or msgspec.structs.replace(run, at=self._run.at) != self._run:
            self._book.write_run(run)
            self._run = run

    def _row(self, number: int, state: str, beats: Mapping[str, Beat], now: float) -> EngineRow:
        beat, known = beats.get(worker_name(ENGINE, number)), self._rows.get(number)
        status = None if beat is None or beat.life != "alive" else beat.status
        report = None if status is None else status.engine
        return EngineRow(
            number=number,
            origin="start" if number < self._engines.count else "added",
            state=state,
            since=now if known is None or known.state != state else known.since,
            url="" if report is None else report.url,
            version=-1 if report is None else report.version,
            restarts=0 if status is None else status.restarts,
            failure="" if status is None else status.last_restart,
        )

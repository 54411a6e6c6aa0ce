"""Executes the orders of the run's order book: adds and removes engines, and stops the run.

The controller calls `EngineOrders.tick` a few times a second. All state is in the order book and in the set of engines,
so a new attempt or a new controller can continue the open orders.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.control.engine_changes import EngineChanges
from relax_core.control.engine_set import EngineSet, limits_of
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.roles.role_context import ENGINE, worker_name
from relax_core.server.engine_order_service import EngineOrderService, answering
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.order_types import EngineRow, Order, RunRow, State, engine_id, read_room
from relax_core.weights.engine_members import EngineMember

FAILED_ORDERS = 20  # number of newest orders that are searched for failures to report
log = logging.getLogger(__name__)


def open_order_store(run_dir: Path, *, count: int, anew: bool) -> tuple[EngineOrderStore, EngineSet]:
    """Opens the order book of a run. Returns the order book, and the run's engines according to the order book.

    ``count`` is engine.count. If ``anew``, a new command begins: the open orders of an earlier command are
    ended, and the run has only the engines of the configuration.
    """
    order_store = EngineOrderStore(run_dir)
    if anew:
        order_store.end_orders()
    rows = [row for row in order_store.engines() if row.origin != "start"]
    present = {row.number: row.url if row.origin == "external" else "" for row in rows if row.present}
    engines = EngineSet(count, added=present, used=order_store.newest_engine())
    engines.failures |= {row.number: row.last_failure for row in rows if row.state == "failed"}
    return order_store, engines


def end_open_orders(order_store: EngineOrderStore) -> None:
    """Ends the open orders at the end of the run. If the order book cannot be written, the next command ends them."""
    try:
        order_store.end_orders()
    except OSError as error:
        log.warning("orders for engines stay open until the next command in this folder: %s", error)


def failed_orders(order_store: EngineOrderStore) -> dict[str, str]:
    """Maps the ids of failed orders, among the newest orders, to the reasons."""
    return {
        order.request_id: order.failure for order in order_store.orders()[:FAILED_ORDERS] if order.status == "FAILED"
    }


def order_answers(
    config: RelaxConfig, order_store: EngineOrderStore, gateway: socket.socket
) -> AbstractContextManager[None]:
    """Answers the gateway's requests for orders while the block runs."""
    desk = EngineOrderService(order_store, limits_of(config), read_room(Path(config.run.dir)))
    return answering(gateway, desk.answer)


class EngineOrders:
    """Executes the open orders in one attempt of the services.

    ``changes`` belongs to the attempt and ``engines`` to the run; ``kind`` is engine.name, and ``steps`` is run.steps.
    ``stop`` asks the run to end with a checkpoint.
    """

    def __init__(
        self,
        order_store: EngineOrderStore,
        changes: EngineChanges,
        engines: EngineSet,
        *,
        kind: str,
        steps: int,
        stop: Callable[[], None],
    ) -> None:
        self._kind = kind
        self._order_store = order_store
        self._changes = changes
        self._engines = engines
        self._steps = steps
        self._stop = stop
        self._unwritable = ""  # why the last tick could not write the order book

    def tick(self, beats: Mapping[str, WorkerHeartbeat], *, step: int, trained: bool, stopping: bool) -> None:
        """Advances each open order. ``trained`` says that a train step of this attempt is done.

        If the order book cannot be written, a warning is logged and training continues. The orders continue at the
        first tick that can write.
        """
        try:
            self._tick(beats, step=step, trained=trained, stopping=stopping)
        except OSError as error:
            if str(error) != self._unwritable:
                log.warning("orders for engines wait, because they cannot be written: %s", error)
            self._unwritable = str(error)
        else:
            self._unwritable = ""

    def _tick(self, beats: Mapping[str, WorkerHeartbeat], *, step: int, trained: bool, stopping: bool) -> None:
        write = partial(self._write, beats, step=step, stopping=stopping)
        write()
        orders = self._order_store.open_orders()
        for order in orders:
            if order.kind == "stop":
                self._tick_stop(order, trained=trained, stopping=stopping)
        for place, order in enumerate(open_order for open_order in orders if open_order.kind != "stop"):
            if place:  # orders after the first order wait
                if order.cancel_requested:
                    self._order_store.move(order, "CANCELLED")
            elif order.kind == "scale_out":
                self._tick_out(order)
            else:
                self._tick_in(order, write)

    def _tick_stop(self, order: Order, *, trained: bool, stopping: bool) -> None:
        if order.status == "STOPPING" and stopping:
            return
        if order.cancel_requested:
            self._order_store.move(order, "CANCELLED")
        elif trained or stopping:
            self._order_store.move(order, "STOPPING")
            self._stop()

    # -- orders that add engines --------------------------------------------------------------------------------------
    def _tick_out(self, order: Order) -> None:
        if order.cancel_requested:
            self._take_back(order, "CANCELLED")
        elif order.failure and not (_keeps(order) and set(order.engines) - self._engines.failures.keys()):
            self._take_back(order, "FAILED")
        elif order.status == "PENDING" and order.body.get("engine_urls"):
            self._follow(self._order_store.move(order, "CONNECTING", engines=self._numbered(order.body["engine_urls"])))
        elif order.status == "PENDING":
            missing = int(order.body["num_replicas"]) - len(self._engines.present())
            self._follow(self._order_store.move(order, "CREATING", engines=self._engines.reserve(max(0, missing))))
        else:
            self._follow(order)

    def _numbered(self, urls: Sequence[str]) -> list[int]:
        """Returns a number for each server. Writes numbers and addresses to the order book before any server joins.

        If a server is already present, an earlier controller added it for this order before it was killed.
        """
        present = set(self._engines.present())
        numbers = {
            member.url: member.number for member in self._engines.members() if member.url and member.number in present
        }
        new = {url: self._engines.reserve(1)[0] for url in urls if url not in numbers}
        now = time.time()
        self._order_store.write_engines(
            EngineRow(id=engine_id(number), origin="external", state="joining", since=now, kind=self._kind, url=url)
            for url, number in new.items()
        )
        return [(numbers | new)[url] for url in urls]

    def _follow(self, order: Order) -> None:
        """Writes the state of an order with joining engines. If an engine fails or is late, the order fails.

        With partial=keep_partial the order's remaining engines continue, and the order fails only if all its engines
        fail.
        """
        if failures := {engine: why for engine, why in self._engines.failures.items() if engine in order.engines}:
            self._give_up(order, failures)
            return
        rows = {row.number: row for row in self._order_store.engines()}
        for number in set(order.engines) - set(self._engines.present()):
            row = rows.get(number)  # an external engine has a row before it joins
            # The order is new, or an earlier controller was killed before it started the engine.
            self._changes.join(number, "" if row is None or row.origin != "external" else row.url)
        age_s = time.time() - order.history[:2][-1].at  # since the order left the queue
        stages: list[State] = [self._changes.stage(number) for number in order.engines]
        if set(stages) <= {"ACTIVE"}:
            self._order_store.move(self._order_store.move(order, "READY"), "ACTIVE")
        elif age_s > (limit := float(order.body["timeout_secs"])):
            for number in order.engines:
                if self._changes.stage(number) != "ACTIVE":
                    self._changes.fail_late(number, f"it did not serve within timeout_secs={limit:g}")
        else:
            order_of: list[State] = ["CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "ACTIVE"]
            least = min(stages, key=order_of.index)
            if order_of.index(least) > order_of.index(order.status):
                self._order_store.move(order, least)

    def _give_up(self, order: Order, failures: Mapping[int, str]) -> None:
        """Writes why engines of an order failed. Engines that are kept stay in the order."""
        words = [f"{worker_name(ENGINE, number)}: {why}" for number, why in failures.items()]
        text = "; ".join([order.failure, *words] if order.failure else words)
        kept = [number for number in order.engines if number not in failures]
        engines = kept if _keeps(order) and kept else order.engines
        self._order_store.move(order, order.status, engines=engines, failure=text)

    def _take_back(self, order: Order, end: State) -> None:
        """Removes the engines of an order, and ends the order when all are removed."""
        for number in set(order.engines) & set(self._engines.present()):
            self._changes.leave(number)
        if not set(order.engines) & {*self._engines.present(), *self._changes.leaving()}:
            self._order_store.move(order, end)

    # -- orders that remove engines -----------------------------------------------------------------------------------
    def _tick_in(self, order: Order, write: Callable[[], None]) -> None:
        if order.status == "PENDING":
            if order.cancel_requested:
                self._order_store.move(order, "CANCELLED")
                return
            order = self._order_store.move(order, "DRAINING", engines=self._chosen(order))
        if not order.cancel_requested:
            for number in set(order.engines) & set(self._engines.present()):
                self._changes.leave(number, at_once=bool(order.body["force"]), timeout_s=order.body["timeout_secs"])
        open_ones = set(order.engines) & set(self._changes.draining())
        if order.cancel_requested and order.status == "DRAINING":
            for number in open_ones:
                self._changes.stay(number)
            write()  # before the order ends: its readers and the next order must see these engines as serving
            left = [number for number in order.engines if number not in open_ones]
            self._order_store.move(order, "CANCELLED", engines=left)
        elif not set(order.engines) & set(self._changes.leaving()):
            self._order_store.move(self._order_store.move(order, "REMOVING"), "COMPLETED")
        elif not open_ones:
            self._order_store.move(order, "REMOVING")

    def _chosen(self, order: Order) -> list[int]:
        """Returns the engines to remove: the engines in the order, or the newest engines beyond num_replicas."""
        added = [engine for engine in self._engines.present() if engine >= self._engines.count]
        if order.body.get("engine_ids"):
            return [number for number in order.body["engine_ids"] if number in added]
        more = len(self._engines.present()) - int(order.body["num_replicas"])
        return added[max(0, len(added) - more) :] if more > 0 else []

    # -- rows of the order book ---------------------------------------------------------------------------------------
    def _write(self, beats: Mapping[str, WorkerHeartbeat], *, step: int, stopping: bool) -> None:
        """Writes the rows of the engines and of the run."""
        now, known = time.time(), {row.number: row for row in self._order_store.engines()}
        rows = {
            member.number: self._row(member, beats, known.get(member.number), step=step)
            for member in self._engines.members()
        }
        for number in self._engines.failures.keys() - rows.keys() - known.keys():  # engines that failed without a row
            known[number] = EngineRow(id=engine_id(number), origin="added", state="joining", since=now)
        for number in known.keys() - rows.keys():
            row, failure = known[number], self._engines.failures.get(number, "")
            if row.state != (state := "failed" if failure else "left"):
                to_step = None if row.from_step is None else step
                row = replace(row, state=state, since=now, to_step=to_step)
                row = replace(row, samples_running=None, samples_waiting=None, tokens_per_s=None, cache_share=None)
            rows[number] = replace(row, last_failure=failure)
        self._order_store.write_engines(rows.values())
        run = RunRow(at=now, step=step, steps=self._steps, stopping=stopping)
        if self._order_store.run is None or replace(run, at=self._order_store.run.at) != self._order_store.run:
            self._order_store.run = run

    def _row(
        self, member: EngineMember, beats: Mapping[str, WorkerHeartbeat], known: EngineRow | None, *, step: int
    ) -> EngineRow:
        beat = beats.get(worker_name(ENGINE, member.number))
        status = None if beat is None else beat.alive
        report = None if status is None else status.engine
        from_step = None if known is None else known.from_step
        return EngineRow(
            id=engine_id(member.number),
            origin=member.origin,
            state=member.state,
            since=time.time() if known is None or known.state != member.state else known.since,
            url=member.url if report is None else report.url,
            weight_version=-1 if report is None else report.version,
            restarts=0 if status is None else status.restarts,
            last_failure="" if status is None else status.last_restart,
            kind=self._kind,
            from_step=step if from_step is None and member.state != "joining" else from_step,
            samples_running=None if report is None else report.running,
            samples_waiting=None if report is None else report.waiting,
            tokens_per_s=None if report is None else report.tokens_per_s,
            cache_share=None if report is None else report.cache_share,
        )


def _keeps(order: Order) -> bool:
    """Returns whether an order keeps its remaining engines if some fail (partial=keep_partial)."""
    return bool(order.body["partial"] == "keep_partial")

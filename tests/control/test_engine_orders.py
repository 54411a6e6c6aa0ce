"""Tests that a controller and its successor execute the orders in the order book, on real Ray actors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.control.engine_orders import EngineOrders, end_open_orders, open_order_store
from relax_core.control.process_metrics import EngineMetrics
from relax_core.roles.worker import EngineReport
from relax_core.server.order_types import Kind, Order, State, StateAt
from tests.control.changes_harness import Run, run

__all__ = ["run"]
DEFAULTS = {"timeout_secs": 600.0, "partial": "rollback_all"}


class Ordered:
    """Holds the orders of a run. The test calls `tick` in place of the controller."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        folder.mkdir()
        self.order_store, run.engines = open_order_store(folder, count=1, anew=True)
        self.stops = 0
        self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Begins an attempt with the current engines."""
        self.run.begin(folder)
        self.orders = EngineOrders(
            self.order_store,
            self.run.changes,
            self.run.engines,
            kind="embedded",
            steps=10,
            stop=self.stop,
        )

    def stop(self) -> None:
        self.stops += 1

    def place(self, kind: Kind, state: State = "PENDING", **body: Any) -> str:
        return self.order_store.place(kind, body, status=state).request_id

    def order(self, name: str) -> Order:
        order = self.order_store.order(name)
        assert order is not None
        return order

    def change(self, name: str, **parts: Any) -> None:
        self.order_store._orders[name] = replace(self.order(name), **parts)

    def tick(self, *, trained: bool = True) -> None:
        self.run.tick()
        self.orders.tick(self.run.health.beats, step=3, trained=trained, stopping=self.stops > 0)

    def numbers(self, *, step: int) -> dict[str, float]:
        """Returns the recorded metrics of the engines at a train step."""
        records: list[tuple[int, dict[str, float]]] = []
        numbers = EngineMetrics(
            self.run.engines,
            record=lambda step, values: records.append((step, dict(values))),
            add_decoding=lambda step, engines: None,
        )
        for _ in range(2):  # once per train step
            numbers.record(self.run.health.beats, step=step)
        ((recorded, found),) = records
        assert recorded == step
        return found

    def until(self, name: str, state: State) -> Order:
        def reached() -> bool:
            self.orders.tick(self.run.health.beats, step=3, trained=True, stopping=False)
            return self.order(name).status == state

        self.run.tick_until(f"{self.order(name)}", reached)
        return self.order(name)

    def serve(self, number: int) -> None:
        self.tick()
        self.run.tell(number, engine=EngineReport(url=f"http://h:{number}", version=4, running=2, waiting=7))


@pytest.fixture
def ordered(run: Run, tmp_path: Path) -> Ordered:
    ordered = Ordered(run, tmp_path / "run")
    run.publish(4)
    run.tell(0, engine=EngineReport(url="http://h:0", version=4))
    return ordered


def states(order: Order) -> list[str]:
    return [change.state for change in order.history]


def test_engines_are_added_taken_out_and_kept(ordered: Ordered) -> None:
    out = ordered.place("scale_out", num_replicas=3, **DEFAULTS)
    ordered.until(out, "HEALTH_CHECKING")
    for number in (1, 2):
        ordered.serve(number)
    order = ordered.until(out, "ACTIVE")
    assert order.engines == [1, 2] and not order.failure
    assert states(order) == ["PENDING", "CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE"]
    ordered.tick()
    rows = {row.number: row for row in ordered.order_store.engines()}
    assert {number: row.state for number, row in rows.items()} == {0: "serving", 1: "serving", 2: "serving"}
    assert (rows[2].origin, rows[2].weight_version, rows[2].url) == ("added", 4, "http://h:2")
    assert (rows[2].kind, rows[2].from_step, rows[2].to_step, rows[2].samples_waiting) == ("embedded", 3, None, 7)
    numbers = ordered.numbers(step=4)
    assert {name: numbers[f"engine-2/{name}"] for name in ("version", "running", "waiting", "restarts")} == {
        "version": 4,
        "running": 2,
        "waiting": 7,
        "restarts": 0,
    }
    assert "engine-1/version" in numbers and "engine-2/tokens_per_s" not in numbers

    kept = ordered.place("scale_in", num_replicas=1, engine_ids=None, force=False, timeout_secs=None)
    ordered.until(kept, "DRAINING")
    ordered.order_store.ask_cancel(kept)
    assert ordered.until(kept, "CANCELLED").engines == [] and ordered.run.states()[2] == "serving"
    assert all(row.present for row in ordered.order_store.engines()), "an order to remove them finds them"

    ray.get(ordered.run.services.rollouts[1].owe.remote(0))
    gone = ordered.place("scale_in", num_replicas=2, engine_ids=None, force=False, timeout_secs=None)
    order = ordered.until(gone, "COMPLETED")
    assert order.engines == [2] and states(order) == ["PENDING", "DRAINING", "REMOVING", "COMPLETED"]
    named = ordered.place("scale_in", num_replicas=None, engine_ids=[0, 1], force=True, timeout_secs=None)
    assert ordered.until(named, "COMPLETED").engines == [1], "a first engine stays"
    ordered.tick()
    assert [row.state for row in ordered.order_store.engines()] == ["serving", "left", "left"]
    assert [row.to_step for row in ordered.order_store.engines()] == [None, 3, 3]


def test_an_order_that_fails_or_is_cancelled_is_rolled_back(ordered: Ordered) -> None:
    ray.get(ordered.run.services.rollouts[1].owe.remote(0))
    out = ordered.place("scale_out", num_replicas=3, **DEFAULTS)
    ordered.serve(1)
    ordered.run.tick_until("it does not serve", lambda: ordered.run.states()[1] == "serving")
    ordered.run.tell(2, state="failed", detail="no memory is left", error="…")
    order = ordered.until(out, "FAILED")
    assert order.failure == "engine-2: no memory is left" and ordered.run.states() == {0: "serving"}

    cancelled = ordered.place("scale_out", num_replicas=2, **DEFAULTS)
    ordered.until(cancelled, "CREATING" if ordered.order(cancelled).status == "PENDING" else "HEALTH_CHECKING")
    ordered.order_store.ask_cancel(cancelled)
    assert ordered.until(cancelled, "CANCELLED").engines == [3], "numbers are never used twice"
    kept = ordered.place("scale_out", num_replicas=3, timeout_secs=600.0, partial="keep_partial")
    ordered.serve(4)
    ordered.serve(5)
    ordered.run.tell(5, state="failed", detail="no memory is left", error="…")
    order = ordered.until(kept, "ACTIVE")
    assert order.engines == [4] and ordered.run.states() == {0: "serving", 4: "serving"}
    assert order.failure == "engine-5: no memory is left", "the order reports its failed part"
    late = ordered.place("scale_out", num_replicas=4, timeout_secs=600.0, partial="keep_partial")
    ordered.serve(6)
    ordered.run.tick_until("it does not serve", lambda: ordered.run.states()[6] == "serving")
    ordered.change(late, body={"num_replicas": 4, "timeout_secs": 1e-3, "partial": "keep_partial"})
    order = ordered.until(late, "ACTIVE")
    assert order.engines == [6] and order.failure == "engine-7: it did not serve within timeout_secs=0.001"
    ordered.tick()
    failed = {row.number: row.last_failure for row in ordered.order_store.engines() if row.state == "failed"}
    assert failed[5] == "no memory is left" and failed.keys() == {2, 5, 7}, "each assigned number is reported"


def test_a_file_that_cannot_be_written_delays_orders_and_nothing_else(
    ordered: Ordered, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = ordered.place("scale_out", num_replicas=2, **DEFAULTS)
    file, moved = tmp_path / "run" / "events", tmp_path / "moved"
    file.rename(moved)
    file.touch()
    ordered.tick()
    ordered.tick()
    assert ordered.run.states() == {0: "serving"}, "nothing is done before it is written"
    end_open_orders(ordered.order_store)
    file.unlink()
    moved.rename(file)
    words = [record.getMessage() for record in caplog.records]
    assert sum("orders for engines wait" in word for word in words) == 1 and "stay open" in words[-1]
    ordered.serve(1)
    assert ordered.until(out, "ACTIVE").engines == [1]


def test_servers_join_by_their_addresses_in_turn(ordered: Ordered, tmp_path: Path) -> None:
    """A controller is lost after it has written the servers' numbers. The next controller uses the same numbers."""
    body = {"timeout_secs": 600.0, "partial": "rollback_all"}
    place = partial(ordered.order_store.place, "scale_out", queues=True)
    asked = (["http://h:1", "http://h:2"], ["http://h:3"], ["http://h:4"])
    first, second, third = (place({**body, "engine_urls": urls}).request_id for urls in asked)
    ordered.orders._numbered(["http://h:1", "http://h:2"])
    for _ in range(2):
        ordered.order_store, ordered.run.engines = open_order_store(tmp_path / "run", count=1, anew=False)
        ordered.begin(tmp_path / "run")
        ordered.tick()
        order = ordered.order(first)
        assert order.status == "CONNECTING" and order.engines == [1, 2]
    members = ordered.run.members.read()
    assert [(member.origin, member.url) for member in members.members[1:]] == [
        ("external", f"http://h:{n}") for n in (1, 2)
    ]
    assert ordered.order(second).status == "PENDING", "it is queued, and its timeout has not started"
    ordered.change(second, history=[StateAt(state="PENDING", at=1.0)])
    ordered.order_store.ask_cancel(third)
    ordered.tick()
    assert ordered.order(third).status == "CANCELLED", "a queued order is cancelled at once"
    for number in (1, 2):
        ordered.serve(number)
    assert states(ordered.until(first, "ACTIVE"))[:2] == ["PENDING", "CONNECTING"]
    assert ordered.run.attached == [True, True], "each request has the key of external servers"
    ordered.tick()
    ordered.serve(3)
    assert ordered.until(second, "ACTIVE").engines == [3]
    ordered.tick()
    rows = {row.number: row for row in ordered.order_store.engines()}
    assert (rows[3].origin, rows[3].url) == ("external", "http://h:3")


def test_the_next_controller_goes_on_and_the_next_command_begins_anew(ordered: Ordered, tmp_path: Path) -> None:
    """A controller is lost right after it has written its intent. The next controller is lost while an engine joins."""
    out = ordered.place("scale_out", num_replicas=2, **DEFAULTS)
    ordered.order_store.move(ordered.order(out), "CREATING", engines=[1])
    for _ in range(2):
        ordered.order_store, ordered.run.engines = open_order_store(tmp_path / "run", count=1, anew=False)
        ordered.begin(tmp_path / "run")
        ordered.tick()
        assert ordered.run.states() == {0: "serving", 1: "joining"}
    ordered.serve(1)
    assert ordered.until(out, "ACTIVE").engines == [1]
    stop = ordered.place("stop")
    ordered.tick(trained=False)
    assert ordered.order(stop).status == "PENDING" and not ordered.stops, "no step is done, so there is no checkpoint"
    ordered.tick()
    ordered.tick()
    assert ordered.order(stop).status == "STOPPING" and ordered.stops == 1
    running = ordered.place("scale_out", num_replicas=3, **DEFAULTS)
    ordered.order_store, engines = open_order_store(tmp_path / "run", count=1, anew=True)
    assert ordered.order(stop).status == "COMPLETED" and ordered.order(running).status == "FAILED"
    assert engines.present() == [0] and engines.reserve(1) == [2]

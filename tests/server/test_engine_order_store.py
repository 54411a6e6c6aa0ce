"""Tests the order book: one order for engines at a time, idempotent results, and the state for the next controller."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_core.server.engine_order_store as module
from relax_core.server.engine_order_store import EngineOrderStore, order_history
from relax_core.server.order_types import EngineRow, Order, Refusal, RunRow, ScaleDecision

BODY = {"num_replicas": 2}


def place(order_store: EngineOrderStore, *, key: str | None = None, replicas: int = 2) -> Order:
    return order_store.place("scale_out", {"num_replicas": replicas}, key=key)


def test_one_order_for_engines_is_open_at_a_time_and_a_stop_waits_for_none(tmp_path: Path) -> None:
    order_store = EngineOrderStore(tmp_path)
    first = place(order_store)
    with pytest.raises(Refusal, match="is under way") as refused:
        order_store.place("scale_in", {})
    assert refused.value.problem.request_id == first.request_id
    stop = order_store.place("stop", {})
    assert [order.request_id for order in order_store.open_orders()] == [first.request_id, stop.request_id]
    for state in ("CREATING", "ACTIVE"):
        first = order_store.move(first, state, engines=[3])
    assert first.ended and first.engines == [3]
    assert [change.state for change in first.history] == ["PENDING", "CREATING", "ACTIVE"]
    with pytest.raises(Refusal, match="is ACTIVE and can no longer be cancelled"):
        order_store.ask_cancel(first.request_id)
    noop = order_store.place("scale_out", BODY, status="NOOP")
    assert order_store.order(noop.request_id) == noop and noop.ended, "a NOOP order can be read, too"
    second = place(order_store)
    stale = order_store.open_orders()[-1]
    assert (
        order_store.ask_cancel(second.request_id).cancel_requested
        and order_store.ask_cancel(second.request_id).cancel_requested
    )
    assert order_store.move(stale, "CREATING").cancel_requested, "a stale copy does not clear the cancel request"
    names = [order.request_id for order in order_store.orders("scale_out")]
    assert names == [second.request_id, noop.request_id, first.request_id]
    assert [order.request_id for order in order_store.orders("scale_out", status="ACTIVE")] == [first.request_id]


def test_a_key_gives_the_same_answer_to_the_same_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ORDERS", 2)
    order_store = EngineOrderStore(tmp_path)
    first = place(order_store, key="a")
    assert EngineOrderStore(tmp_path).place("scale_out", BODY, key="a") == first, (
        "the next controller gives the same answer"
    )
    with pytest.raises(Refusal, match="came with another order"):
        place(order_store, key="a", replicas=3)
    order_store.move(first, "ACTIVE")
    for key in "bc":
        order_store.move(place(order_store, key=key), "ACTIVE")
    assert place(order_store, key="a").request_id != first.request_id, "only the newest orders are kept"
    assert len(EngineOrderStore(tmp_path).orders()) == 2


def test_the_next_controller_knows_what_was_written_whole(tmp_path: Path) -> None:
    order_store = EngineOrderStore(tmp_path)
    rows = [
        EngineRow(id=f"engine-{number}", origin=origin, state="serving", since=1.0, from_step=2)
        for number, origin in enumerate(["start", "added"])
    ]
    order_store.write_engines(rows)
    file = tmp_path / "events" / "0000.orders.0.jsonl"
    size = file.stat().st_size
    order_store.write_engines([EngineRow(**vars(rows[1]) | {"samples_running": 8, "weight_version": 3})])
    assert file.stat().st_size == size and order_store.engines()[1].samples_running == 8, "loads are not written"
    order = order_store.move(place(order_store), "CREATING", engines=[4])
    out = ScaleDecision(at=2.0, action="out", reason="it waits", engines=2, target=3)
    order_store.decided(out)
    order_store.decided(ScaleDecision(at=3.0, action="none", reason="it does not", engines=2, target=2))
    order_store.enable_autoscaler(True)
    with file.open("ab") as opened:
        opened.write(b'{"type":"order","change": {"request_id"')  # a process was killed in the middle of a write
    second = EngineOrderStore(tmp_path)
    assert second.engines() == rows and second.orders() == [order] and second.newest_engine() == 4
    assert second.autoscaler and second.decisions() == [out] and second.run is None and second.last_decision is None
    second.run = RunRow(at=2.0, step=3, steps=9, stopping=False)
    second.end_orders()
    third = EngineOrderStore(tmp_path)
    assert [(row.state, row.to_step) for row in third.engines()] == [("serving", None), ("left", 3)]
    assert [placed_order.status for placed_order in third.orders("scale_out")] == ["FAILED"]


def test_a_run_is_repeatable_until_an_added_engine_has_served(tmp_path: Path) -> None:
    assert order_history(tmp_path, sampled={}, repeatable=True) == {"engines": [], "operations": []}
    order_store = EngineOrderStore(tmp_path)
    order = order_store.place("scale_out", {"num_replicas": 3})
    start = EngineRow(id="engine-0", origin="start", state="serving", since=1.0, from_step=0)
    never = EngineRow(id="engine-1", origin="added", state="failed", since=1.0, last_failure="no memory is left")
    order_store.write_engines([start, never])
    assert "repeatable" not in order_history(tmp_path, sampled={}, repeatable=True), "the engine has sampled nothing"
    order_store.write_engines(
        [EngineRow(id="engine-2", origin="added", state="left", since=1.0, from_step=7, to_step=9)]
    )
    order_store.move(order, "ACTIVE", engines=[2], failure="engine-1: no memory is left")
    told = order_history(tmp_path, sampled={"engine-2": (8, 99)}, repeatable=True)
    assert (told["repeatable"], told["repeatable_steps"]) == (False, 7)
    assert [(engine["id"], engine["from_step"], engine["to_step"]) for engine in told["engines"]] == [
        ("engine-0", 0, None),
        ("engine-1", None, None),
        ("engine-2", 7, 9),
    ]
    assert [(engine["samples"], engine["tokens"]) for engine in told["engines"]] == [(0, 0), (0, 0), (8, 99)]
    assert told["operations"][0]["engine_ids"] == ["engine-2"]
    assert [change["state"] for change in told["operations"][0]["history"]] == ["PENDING", "ACTIVE"]
    assert "repeatable" not in order_history(tmp_path, sampled={}, repeatable=False)

"""What summary.json says of engines and orders, and of the seed."""

from __future__ import annotations

from pathlib import Path

from relax_core.server.order_book import EngineRow, OrderBook
from relax_core.server.order_history import order_history


def test_a_run_is_repeatable_until_an_added_engine_has_served(tmp_path: Path) -> None:
    assert order_history(tmp_path, sampled={}, repeatable=True) == {"engines": [], "operations": []}
    book = OrderBook(tmp_path)
    order, _ = book.place("scale_out", {"num_replicas": 3}, decide=lambda engines: "PENDING")
    start = EngineRow(number=0, origin="start", state="serving", since=1.0, from_step=0)
    never = EngineRow(number=1, origin="added", state="failed", since=1.0, failure="no memory is left")
    book.write_engines([start, never])
    assert "repeatable" not in order_history(tmp_path, sampled={}, repeatable=True), "it has sampled nothing"
    book.write_engines([EngineRow(number=2, origin="added", state="left", since=1.0, from_step=7, to_step=9)])
    book.move(order, "ACTIVE", engines=[2], failure="engine-1: no memory is left")
    told = order_history(tmp_path, sampled={"engine-2": (8, 99)}, repeatable=True)
    assert (told["repeatable"], told["repeatable_steps"]) == (False, 7)
    assert [(one["id"], one["from_step"], one["to_step"]) for one in told["engines"]] == [
        ("engine-0", 0, None),
        ("engine-1", None, None),
        ("engine-2", 7, 9),
    ]
    assert [(one["samples"], one["tokens"]) for one in told["engines"]] == [(0, 0), (0, 0), (8, 99)]
    assert told["operations"][0]["engine_ids"] == ["engine-2"]
    assert [one["state"] for one in told["operations"][0]["history"]] == ["PENDING", "ACTIVE"]
    assert "repeatable" not in order_history(tmp_path, sampled={}, repeatable=False)
    book.close()

"""The order book: one order for engines at a time, answers that repeat, and what remains when a process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import relax_core.server.order_book as module
from relax_core.server.order_book import EngineRow, Order, OrderBook, OrderRefused, RunRow

BODY = {"num_replicas": 2}


def place(book: OrderBook, *, key: str | None = None, replicas: int = 2) -> Order:
    return book.place("scale_out", {"num_replicas": replicas}, decide=lambda engines: "PENDING", key=key)[0]


def test_one_order_for_engines_is_open_at_a_time_and_a_stop_waits_for_none(tmp_path: Path) -> None:
    book = OrderBook(tmp_path)
    first = place(book)
    with pytest.raises(OrderRefused, match="is under way") as refused:
        book.place("scale_in", {}, decide=lambda engines: "PENDING")
    assert refused.value.busy == first.id
    stop, _ = book.place("stop", {}, decide=lambda engines: "PENDING")
    assert [one.id for one in book.open_orders()] == [first.id, stop.id]
    for state in ("CREATING", "ACTIVE"):
        first = book.move(first, state, engines=[3])
    assert (
        first.ended
        and first.engines == [3]
        and [one.state for one in first.history] == ["PENDING", "CREATING", "ACTIVE"]
    )
    with pytest.raises(OrderRefused, match="is ACTIVE and can no longer be cancelled"):
        book.ask_cancel(first.id)
    noop, _ = book.place("scale_out", BODY, decide=lambda engines: "NOOP")
    assert book.order(noop.id) == noop and noop.ended, "it can be read, too"
    second = place(book)
    assert book.ask_cancel(second.id).cancel and book.ask_cancel(second.id).cancel
    assert [one.id for one in book.orders("scale_out", state=None, limit=2, offset=0)] == [second.id, noop.id]
    assert [one.id for one in book.orders("scale_out", state="ACTIVE", limit=9, offset=0)] == [first.id]
    book.close()


def test_a_key_gives_the_same_answer_to_the_same_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_KEYS", 2)
    book = OrderBook(tmp_path)
    first = place(book, key="a")
    assert book.place("scale_out", BODY, decide=lambda engines: "NOOP", key="a") == (first, False)
    with pytest.raises(OrderRefused, match="came with another order"):
        place(book, key="a", replicas=3)
    book.move(first, "ACTIVE")
    for key in "bc":
        book.move(place(book, key=key), "ACTIVE")
    assert place(book, key="a").id != first.id, "only the newest keys are kept"
    book.close()


def test_the_book_says_which_engines_the_run_has(tmp_path: Path) -> None:
    book, other = OrderBook(tmp_path), OrderBook(tmp_path)
    rows = [
        EngineRow(number=number, origin=origin, state="serving", since=1.0, from_step=2)
        for number, origin in enumerate(["start", "added"])
    ]
    book.write_engines(rows)
    assert other.run() is None
    book.write_run(RunRow(at=2.0, step=3, steps=9, stopping=False))
    seen: list[EngineRow] = []
    other.place("scale_in", BODY, decide=lambda engines: "PENDING" if seen.extend(engines) is None else "NOOP")
    assert book.newest_engine() == 1
    assert seen == rows and other.run() == RunRow(at=2.0, step=3, steps=9, stopping=False)
    book.end_orders()
    assert [(row.state, row.to_step) for row in other.engines()] == [("serving", None), ("left", 3)]
    assert [one.state for one in other.orders("scale_in", state=None, limit=9, offset=0)] == ["FAILED"]
    book.close()
    other.close()


def test_a_transaction_of_a_killed_process_has_not_happened(tmp_path: Path) -> None:
    """The other process waits for it no longer than it lives."""
    code = (
        "import sys, pathlib, time; from relax_core.server.order_book import OrderBook; "
        "book = OrderBook(pathlib.Path(sys.argv[1])); "
        "wait = lambda engines: (print('inside', flush=True), time.sleep(600), 'PENDING')[2]; "
        "book.place('scale_out', {}, decide=wait)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"inside\n"
        os.kill(process.pid, signal.SIGKILL)
    book = OrderBook(tmp_path)
    assert book.open_orders() == []
    assert place(book).state == "PENDING"
    book.close()

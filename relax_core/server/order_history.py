"""Says for summary.json which engines a run had, which orders it got, and how much of it the same seed repeats."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.server.order_book import OrderBook, engine_id

MOST_ORDERS = 1000  # the newest ones


def order_history(run_dir: Path, *, sampled: Mapping[str, tuple[int, int]], repeatable: bool) -> dict[str, Any]:
    """Returns ``engines`` and ``operations`` of the run's order book, and what is left of ``repeatable``.

    ``sampled`` has the samples and the tokens of each engine by its id; one that is missing has sampled nothing.
    A run that would be repeatable is no longer so once an added engine has served, because the answers of engines that
    share prompts depend on which are there. ``repeatable_steps`` is then the number of train steps before.
    """
    try:
        book = OrderBook(run_dir)
    except sqlite3.Error:  # the run failed before it had one
        return {"engines": [], "operations": []}
    rows = book.engines()
    orders = book.newest_orders(MOST_ORDERS)
    book.close()
    engines = [
        {
            "id": engine_id(row.number),
            "origin": row.origin,
            "state": row.state,
            "from_step": row.from_step,
            "to_step": row.to_step,
            "samples": sampled.get(engine_id(row.number), (0, 0))[0],
            "tokens": sampled.get(engine_id(row.number), (0, 0))[1],
            "restarts": row.restarts,
            "last_failure": row.failure,
        }
        for row in rows
    ]
    operations = [
        {
            "request_id": order.id,
            "kind": order.kind,
            "body": order.body,
            "engine_ids": [engine_id(number) for number in order.engines],
            "failure": order.failure,
            "history": [{"state": one.state, "at": one.at} for one in order.history],
        }
        for order in reversed(orders)
    ]
    told: dict[str, Any] = {"engines": engines, "operations": operations}
    served = [row.from_step for row in rows if row.origin != "start" and row.from_step is not None]
    return told | ({"repeatable": False, "repeatable_steps": min(served)} if repeatable and served else {})

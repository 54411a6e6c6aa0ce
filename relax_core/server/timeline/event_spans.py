"""Makes the spans of restarts, recoveries and orders from the files that a run leaves of them.

`logs/recoveries.json` has every process that was lost and replaced, and `operations.jsonl` every order.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec

from relax_core.contracts.foreign_files import decode_json, read_whole
from relax_core.observe.event_log import ACTOR
from relax_core.server.order_book import FILE as BOOK
from relax_core.server.orders import ENDED
from relax_core.server.run_folders import BROKEN, inside, open_inside, reason
from relax_core.server.run_series import TimedRecord
from relax_core.server.timeline.timeline_spans import Span

RESTARTS_LANE, RECOVERIES_LANE, ORDERS_LANE = "restarts", "recoveries", "orders"
FILE = ("logs", "recoveries.json")
IN_PLACE = 1  # the tier of a recovery that is a restart of one process
MOST_ORDERS = 1000  # the newest ones
MOST_STATES = 100  # of an order
MOST_FILE, MOST_BOOK = 4 * 2**20, 64 * 2**20  # bytes of a JSON file, and of the end of that of the orders
MOST_NAMED = 4  # engines of an order that its name has


class _Recovery(msgspec.Struct):
    tier: int
    cause: str
    at_step: int
    from_step: int
    time_s: float | None = None
    seconds: float | None = None


class _StateAt(msgspec.Struct):
    state: str
    at: float


class _Order(msgspec.Struct):
    request_id: str
    kind: str
    engine_ids: list[str]
    failure: str
    history: Annotated[list[_StateAt], msgspec.Meta(min_length=1, max_length=MOST_STATES)]


class _Line(msgspec.Struct):
    order: _Order | None = None


_recoveries_decoder = msgspec.json.Decoder(list[_Recovery])
_line_decoder = msgspec.json.Decoder(_Line)


def event_spans(run_dir: Path, timed: Sequence[TimedRecord]) -> tuple[list[Span], list[str]]:
    """Returns the spans of restarts, recoveries and orders of a run, and sentences about files that cannot be read.

    What has not ended lasts until the newest of the records ``timed``.
    """
    spans: list[Span] = []
    problems: list[str] = []
    ends = [(one.end_s, one.step) for one in timed if one.source == ACTOR]
    newest_s = max((one.end_s for one in timed), default=0.0)
    try:
        spans += _recovery_spans(_recoveries(run_dir), ends, newest_s)
    except BROKEN as error:
        words = reason("", error)
        problems.append(f"{'/'.join(FILE)} cannot be read, so no restart and no recovery is shown: {words}.")
    try:
        for order in _orders(run_dir):
            spans += _order_spans(order, ends, newest_s)
    except BROKEN as error:
        problems.append(f"The orders of the run cannot be read just now: {reason('', error)}.")
    return spans, problems


def _recoveries(run_dir: Path) -> list[_Recovery]:
    try:
        path = inside(run_dir, *FILE)
    except FileNotFoundError:  # nothing was lost
        return []
    return decode_json(read_whole(path, most_bytes=MOST_FILE), _recoveries_decoder)


def _recovery_spans(
    recoveries: Sequence[_Recovery], ends: Sequence[tuple[float, int]], newest_s: float
) -> Iterator[Span]:
    for one in recoveries:
        if one.time_s is None:  # an older Relax wrote no times
            continue
        if one.seconds is not None:
            end_s = one.time_s + one.seconds
        else:  # the controller that began it has ended before it saw a train step
            place = bisect_right(ends, one.time_s, key=itemgetter(0))
            end_s = ends[place][0] if place < len(ends) else max(one.time_s, newest_s)
        in_place = one.tier == IN_PLACE
        yield Span(
            lane=RESTARTS_LANE if in_place else RECOVERIES_LANE,
            name=one.cause if in_place else f"{one.cause}; all services start again from step {one.from_step}",
            start_s=one.time_s,
            end_s=end_s,
            step=one.at_step,
        )


def _orders(run_dir: Path) -> list[_Order]:
    """Returns the newest orders, the oldest of them first. Raises OSError and ValueError."""
    found: dict[str, _Order] = {}
    try:
        file = open_inside(run_dir, BOOK)
    except FileNotFoundError:  # the run had no gateway
        return []
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BOOK))
        for line in file.read(MOST_BOOK).splitlines():
            try:
                order = decode_json(line, _line_decoder).order
            except ValueError:  # a part of a line
                continue
            if order is not None:
                found[order.request_id] = order
    return list(found.values())[-MOST_ORDERS:]


def _order_spans(order: _Order, ends: Sequence[tuple[float, int]], newest_s: float) -> Iterator[Span]:
    """Yields a span for each state of an order; the state in which it ended has no length."""
    named = ", ".join(order.engine_ids[:MOST_NAMED])
    more = len(order.engine_ids) - MOST_NAMED
    what = f"{order.kind} {named}{f' and {more} more' if more > 0 else ''}".strip()
    until = [one.at for one in order.history[1:]]
    for one, end_s in zip(order.history, [*until, None], strict=True):
        last_s = one.at if one.state in ENDED else max(one.at, newest_s)
        failure = f": {order.failure}" if order.failure and end_s is None else ""
        yield Span(
            lane=ORDERS_LANE,
            name=f"{what}: {one.state}{failure}",
            start_s=one.at,
            end_s=last_s if end_s is None else end_s,
            step=_step_at(ends, one.at),
        )


def _step_at(ends: Sequence[tuple[float, int]], time_s: float) -> int:
    """Returns the train step that was under way at a time."""
    place = bisect_right(ends, time_s, key=itemgetter(0))
    if place < len(ends):
        return ends[place][1]
    return ends[-1][1] + 1 if ends else 0

"""A data source of a plug-in, tried in a process that can be killed: it is opened twice and gives the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from relax_core.contracts.checks.plugin_results import WrongResult
from relax_core.contracts.data import BaseDataSource
from relax_core.registry import find_data_source, plugin_words
from relax_core.rollout.trial.plugin_trial import START_S, Request, Stage


def try_data_source(request: Request, say: Callable[[Stage], None]) -> Iterator[str]:
    """Yields what is wrong with the source, at most one sentence.

    The check of the data reports rows for which the source raises, and counts them against ``data.max_bad_rows``.
    """
    name, packed = request.data
    where = f"data.name={name}"
    say(Stage(what=f"{where}: its import", limit_s=START_S))
    spec = find_data_source(name)
    config = msgspec.msgpack.decode(packed, type=spec.config)
    try:
        say(Stage(what=f"{where}: to open it", limit_s=request.open_s))
        source = spec.open(config)
        rows = _tried_rows(source, where, say, limit_s=request.call_s)
        say(Stage(what=f"{where}: to open it once more, as another process does", limit_s=request.open_s))
        other = spec.open(config)
        if len(source) != len(other):
            yield f"{where}: it has {len(source)} rows, and {len(other)} when it is opened once more. {_SAME}"
            return
        say(Stage(what=f"{where}: its held-out rows", limit_s=request.open_s))
        other.held_out()
        again = _tried_rows(other, where, say, limit_s=request.call_s)
    except WrongResult as error:
        yield f"{where}: {error}"
        return
    except Exception as error:  # foreign code: whatever it raises is told
        yield f"{where}: it cannot be opened: {plugin_words(error)}"
        return
    if changed := [number for number, row in rows.items() if again[number] != row]:
        yield f"{where}: row {changed[0]} is another one when the source is opened once more. {_SAME}"
    elif (problem := _no_data(rows, where)) is not None:
        yield problem


_SAME = "The same number must give the same row in every process, so that a run can be resumed."


def _tried_rows(source: BaseDataSource, where: str, say: Callable[[Stage], None], *, limit_s: float) -> dict[int, Any]:
    """Returns the first row, one in the middle and the last; None for one that raises.

    Raises `WrongResult` for a value that is no row.
    """
    rows: dict[int, Any] = {}
    say(Stage(what=f"{where}: its number of rows", limit_s=limit_s))
    for number in sorted({0, len(source) // 2, len(source) - 1}):
        say(Stage(what=f"{where}: row {number}", limit_s=limit_s))
        try:
            rows[number] = source[number]
        except WrongResult:
            raise
        except Exception:  # foreign code: the look at the data meets it again, and names it
            rows[number] = None
    return rows


def _no_data(rows: dict[int, Any], where: str) -> str | None:
    for number, row in rows.items():
        try:
            msgspec.msgpack.encode(row)
        except TypeError as error:
            return f"{where}: row {number}: {error}. A row holds text, numbers, lists and mappings."
    return None

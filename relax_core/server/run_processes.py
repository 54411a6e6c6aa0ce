"""Tells what the processes of a run use, from the numbers that the run records of them every 5 s."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from relax_core.observe.event_log import PROCESS
from relax_core.server.run_series import RunSeries

MEMORY = ("memory_mb", "children_memory_mb")


def process_rows(series: RunSeries) -> list[dict[str, Any]]:
    """Returns for each process its name, its newest numbers by their names, and the most memory that it had, in MB.

    The memory of its children is counted with its own.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    most: dict[str, float] = defaultdict(float)
    for tag in series.tags():
        source, _, rest = tag.partition("/")
        name, _, number = rest.rpartition("/")
        if source != PROCESS or not name:
            continue
        newest = series.newest(tag)
        if newest is not None:
            found[name][number] = newest
        if number in MEMORY:
            most[name] += max((value for value in series.curve(tag).values if value is not None), default=0.0)
    return [{"name": name, "numbers": numbers, "most_memory_mb": most[name]} for name, numbers in sorted(found.items())]

"""Formats numbers, durations and curves for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"


def sparkline(values: Sequence[float], *, width: int, low: float | None = None, high: float | None = None) -> str:
    """Draws ``values`` as at most ``width`` blocks, each for the mean of its share of the values.

    ``low`` and ``high`` are the ends of the scale, by default the smallest and the largest mean.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [fmean(finite[start:end]) for start, end in pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    return "".join(block(mean, low=low, high=high) for mean in means)


def block(value: float, *, low: float, high: float) -> str:
    """Returns one block whose height shows where ``value`` lies between ``low`` and ``high``."""
    if high <= low:
        return BLOCKS[0]
    height = int((value - low) / (high - low) * len(BLOCKS))
    return BLOCKS[min(max(height, 0), len(BLOCKS) - 1)]


def staleness_shares(histogram: Mapping[int, int]) -> list[tuple[int, float]]:
    """Returns (staleness, share of the samples) for every staleness from 0 to the largest one, in order."""
    total = sum(histogram.values())
    if not total:
        return []
    last = max(staleness for staleness, count in histogram.items() if count)
    return [(staleness, histogram.get(staleness, 0) / total) for staleness in range(last + 1)]


def number(value: float | None, spec: str) -> str:
    """Formats ``value`` by ``spec``, or returns a dash if it is None."""
    return UNKNOWN if value is None else format(value, spec)


def duration(seconds: float | None) -> str:
    """Formats seconds as "12 s", "3:05 min" or "2:07 h"."""
    if seconds is None:
        return UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"

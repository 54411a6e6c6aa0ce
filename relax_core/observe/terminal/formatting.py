"""Numbers as people read them in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"


def sparkline(values: Sequence[float], *, width: int, low: float | None = None, high: float | None = None) -> str:
    """``values`` as at most ``width`` blocks, each the mean of its share. ``low`` and ``high``: the scale's ends, by
    default the smallest and the largest value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [place * len(finite) // count for place in range(count + 1)]
    means = [fmean(finite[start:end]) for start, end in pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    return "".join(block(mean, low=low, high=high) for mean in means)


def block(value: float, *, low: float, high: float) -> str:
    """One block whose height is the place of ``value`` between ``low`` and ``high``."""
    if high <= low:
        return BLOCKS[0]
    place = int((value - low) / (high - low) * len(BLOCKS))
    return BLOCKS[min(max(place, 0), len(BLOCKS) - 1)]


def staleness_shares(histogram: Mapping[int, int]) -> list[tuple[int, float]]:
    """(staleness, share of the samples), in order; every staleness up to the largest seen."""
    total = sum(histogram.values())
    if not total:
        return []
    last = max(staleness for staleness, count in histogram.items() if count)
    return [(staleness, histogram.get(staleness, 0) / total) for staleness in range(last + 1)]


def number(value: float | None, spec: str) -> str:
    """``value`` under format ``spec``, or a dash when it is not known."""
    return UNKNOWN if value is None else format(value, spec)


def duration(seconds: float | None) -> str:
    """12 s, 3:05 min or 2:07 h."""
    if seconds is None:
        return UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"

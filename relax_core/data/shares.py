"""Shares that were seen of a few, and what they say of all."""

from __future__ import annotations

import math

Z_95 = 1.959964  # of a two-sided interval of 95 %
Z_SURE = 4.0  # one in thirty thousand
NAMED_ROWS = 5  # bad rows that are named to the user; so few end no run by themselves


def wilson(share: float, count: float, *, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share that was seen in ``count`` (more than 0) independent cases.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (JASA 22, 1927), without
    continuity correction. It never leaves 0..1 and never has no width, also where all cases were alike.
    """
    scale = 1.0 + z * z / count
    middle = (share + z * z / (2.0 * count)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / count + (z / (2.0 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def too_many_bad(bad: int, looked: int, *, rows: int, most: float) -> bool:
    """Whether more than the share ``most`` of all ``rows`` is bad, where ``bad`` of the ``looked`` ones are.

    Of all rows the share itself counts. Of a part of them a few bad ones may be chance: they count where there are more
    than `NAMED_ROWS` of them, and chance alone would hardly ever (`Z_SURE`) bring so many.
    """
    if looked >= rows or most == 0.0:
        return bad > most * rows
    return bad > NAMED_ROWS and wilson(bad / looked, looked, z=Z_SURE)[0] > most

"""Statistics of shares: confidence intervals, and whether too many data rows are bad."""

from __future__ import annotations

import math

Z_95 = 1.959964  # the normal quantile of a two-sided interval of 95 %
Z_SURE = 4.0  # the normal quantile of an error probability of one in thirty thousand
NAMED_ROWS = 5  # the number of bad rows that a report names; so few do not end a run


def wilson(share: float, count: float, *, z: float = Z_95) -> tuple[float, float]:
    """Returns the confidence interval of a share that was observed in ``count`` (more than 0) independent cases.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (JASA 22, 1927), without
    continuity correction. The interval never leaves 0..1 and always has a width, even if all cases were alike.
    """
    scale = 1.0 + z * z / count
    middle = (share + z * z / (2.0 * count)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / count + (z / (2.0 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def too_many_bad(bad: int, checked: int, *, rows: int, most: float) -> bool:
    """Returns whether more than the share ``most`` of all ``rows`` is bad, if ``bad`` of the ``checked`` ones are.

    If all rows were checked, the share itself decides. Otherwise a few bad ones may be chance: the result is True only
    if there are more than `NAMED_ROWS` of them and chance alone would hardly ever (`Z_SURE`) give so many.
    """
    if checked >= rows or most == 0.0:
        return bad > most * rows
    return bad > NAMED_ROWS and wilson(bad / checked, checked, z=Z_SURE)[0] > most

"""Chooses which media of a run are kept for a person who looks at its samples."""

from __future__ import annotations

import time

# All of the first items, then one each 2 s, 4 s, …; the pause grows with every 500 of them.
ALL_OF, PAUSE_S, DOUBLED_EACH, MOST_KEPT = 64, 2.0, 500, 4000


class KeptRate:
    """Says of one item after the other whether it is kept, so that keeping costs a run at most 1% of a core."""

    def __init__(self) -> None:
        self._kept, self._next = 0, 0.0

    def takes(self) -> bool:
        """Returns whether this item is kept."""
        now = time.monotonic()
        if self._kept >= MOST_KEPT or (self._kept >= ALL_OF and now < self._next):
            return False
        self._next = now + PAUSE_S * 2 ** (self._kept // DOUBLED_EACH)
        self._kept += 1
        return True

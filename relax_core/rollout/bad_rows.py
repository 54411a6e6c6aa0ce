"""The data rows that a run leaves out: counted, the first few named, and the run ended where there are too many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from relax_core.contracts.data import BadRow
from relax_core.data.shares import NAMED_ROWS, too_many_bad

Tell = Callable[[Sequence[Mapping[str, str]]], None]
log = logging.getLogger(__name__)


class BadRows:
    """``rows``: how many there are in all; ``most``: which share of them may be bad (data.max_bad_rows). ``tell`` gets
    the rows that are named, all of them each time that one more is."""

    def __init__(self, *, rows: int, most: float, tell: Tell) -> None:
        self._rows = rows
        self._most = most
        self._tell = tell
        self._met: set[int] = set()
        self._bad: set[int] = set()
        self._named: list[dict[str, str]] = []

    def meet(self, number: int) -> None:
        """A row is drawn, usable or not."""
        if len(self._met) < self._rows:
            self._met.add(number)

    def leave_out(self, number: int, error: BadRow) -> None:
        """A row that was drawn cannot be used. Raises ValueError where that are too many of them."""
        if number in self._bad:
            return
        self._bad.add(number)
        if len(self._named) < NAMED_ROWS:
            self._named.append({"row": str(number), "reason": error.reason, "text": str(error)})
            log.warning("data row %d is left out (%s): %s", number, error.reason, error)
            self._tell(list(self._named))
        if too_many_bad(len(self._bad), len(self._met), rows=self._rows, most=self._most):
            first = "; ".join(one["text"] for one in self._named[:1])
            raise ValueError(
                f"{len(self._bad)} of the {len(self._met)} data rows that were drawn cannot be used, more than "
                f"data.max_bad_rows={self._most:g}. The first: {first} Mend the data, or raise data.max_bad_rows."
            )

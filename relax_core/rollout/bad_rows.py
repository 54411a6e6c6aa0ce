"""Counts the data rows that a run cannot use, names the first few, and ends the run if there are too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from relax_core.contracts.data import BadRow
from relax_core.contracts.media import MediaError
from relax_core.data.eval_sets import NAMED_ROWS, too_many_bad

Report = Callable[[Sequence[Mapping[str, str]]], None]
log = logging.getLogger(__name__)


class BadRows:
    """Counts the drawn and the bad data rows of a rollout worker.

    ``rows`` is the number of data rows, and ``most`` the share of them that may be bad (data.max_bad_rows). ``report``
    is called with all named rows each time that one more is named. ``most_in_a_row`` is the number of rows in a row
    whose images or videos may be bad. ``media_reasons`` counts those that were, by reason.
    """

    def __init__(self, *, rows: int, most: float, report: Report, most_in_a_row: int = 64) -> None:
        self._rows = rows
        self._most = most
        self._report = report
        self._drawn: set[int] = set()
        self._bad: set[int] = set()
        self._named: list[dict[str, str]] = []
        self._most_in_a_row = most_in_a_row
        self._media_in_a_row: list[MediaError] = []
        self.media_reasons: Counter[str] = Counter()

    def draw(self, number: int) -> None:
        """Counts a data row that is drawn, usable or not."""
        if len(self._drawn) < self._rows:
            self._drawn.add(number)

    def use(self) -> None:
        """Says that the data row that was drawn last can be used."""
        self._media_in_a_row.clear()

    def leave_out(self, number: int, error: BadRow) -> None:
        """Counts a drawn data row that cannot be used; raises ValueError if there are too many of them."""
        if isinstance(error, MediaError):
            self._count_media(error)
        if number in self._bad:
            return
        self._bad.add(number)
        if len(self._named) < NAMED_ROWS:
            self._named.append({"row": str(number), "reason": error.reason, "text": str(error)})
            log.warning("data row %d is left out (%s): %s", number, error.reason, error)
            self._report(list(self._named))
        if too_many_bad(len(self._bad), len(self._drawn), rows=self._rows, most=self._most):
            first = "; ".join(one["text"] for one in self._named[:1])
            raise ValueError(
                f"{len(self._bad)} of the {len(self._drawn)} data rows that were drawn cannot be used, more than "
                f"data.max_bad_rows={self._most:g}. The first: {first} Correct the data, or raise data.max_bad_rows."
            )

    def _count_media(self, error: MediaError) -> None:
        """Counts a prompt with a bad item each time that it is drawn; raises ValueError if all in a row have one."""
        self.media_reasons[error.word] += 1
        self._media_in_a_row.append(error)
        if len(self._media_in_a_row) >= self._most_in_a_row:
            raise ValueError(
                f"the images or videos of {len(self._media_in_a_row)} data rows in a row cannot be used, "
                f"which is no chance. The first: "
                f"{self._media_in_a_row[0]} Is data.media_root mounted, and is it the folder of these paths?"
            )

"""Where prompts come from: random access by index, so that a cursor is one integer and a lost prompt can be redone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DataRow = Mapping[str, Any]  # at least "prompt" (str or list of messages) and "answer" (str)

BAD_ROW = "bad_row"
TOO_LONG = "too_long"


class BadRow(ValueError):
    """A data row that cannot be used, while others can. ``reason`` is what the ledger books: ``too_long``, or
    ``bad_row:`` and one word. The text names the row's file and line and says what is wrong with it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

    @staticmethod
    def because(word: str, text: str) -> BadRow:
        """A row whose own content is wrong; ``word`` says which part of it."""
        return BadRow(f"{BAD_ROW}:{word}", text)


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Rows that are evaluated and never trained. ``name``: empty where the run has one set without a name.
    ``bad``: rows that cannot be used; they are no wrong answers."""

    name: str
    rows: Sequence[DataRow]
    bad: Sequence[BadRow] = ()


class PromptSource(Protocol):
    """``row(index)`` for index 0, 1, 2 … without end: epochs follow each other, each shuffled by the run's seed.

    The same (source, seed, index) always gives the same row, in any process. Rows have numbers 0..len-1.
    """

    def __len__(self) -> int:
        """How many rows are trained on, bad ones included."""

    def number(self, index: int) -> int:
        """The number of the row at place ``index`` of the endless order."""

    def row(self, index: int) -> DataRow:
        """The row at place ``index`` of the endless order. Raises `BadRow` for one that cannot be used."""

    def numbered(self, number: int) -> DataRow:
        """The row with this number. Raises `BadRow` for one that cannot be used."""

    def where(self, number: int) -> str:
        """File and line of the row with this number, for an error about it."""

    def held_out(self) -> EvalSet:
        """The held-out split, never among `row`'s."""

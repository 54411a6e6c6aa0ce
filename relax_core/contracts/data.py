"""Where prompts come from: random access by index, so that a cursor is one integer and a lost prompt can be redone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

DataRow = Mapping[str, Any]  # at least "prompt" (str or list of messages) and "answer" (str)


class PromptSource(Protocol):
    """``row(index)`` for index 0, 1, 2 … without end: epochs follow each other, each shuffled by the run's seed.

    The same (source, seed, index) always gives the same row, in any process.
    """

    def row(self, index: int) -> DataRow: ...

    def eval_rows(self) -> list[DataRow]:
        """The held-out split, never among `row`'s."""

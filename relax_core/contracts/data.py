"""The contract of a prompt source: random access by index, so that the data cursor is one integer.

A prompt that was lost can be read again by its index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.contracts.foreign_values import clean_text

DataRow = Mapping[str, Any]  # at least "prompt" (str or list of messages) and "answer" (str)

BAD_ROW = "bad_row"
TOO_LONG = "too_long"


class BadRow(ValueError):
    """Is a data row that cannot be used, although others can.

    ``reason`` is the reason in the ledger: ``too_long``, or ``bad_row:`` and one word. The text names the data row's
    file and line and says what is wrong.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(clean_text(text))
        self.reason = reason

    @staticmethod
    def because(word: str, text: str) -> BadRow:
        """Returns the error for a data row with wrong content; ``word`` says which part of it is wrong."""
        return BadRow(f"{BAD_ROW}:{word}", text)


def question(prompt: Any) -> str:
    """Returns the text of a data row's prompt; of messages that of the last user."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        content = message.get("content")
        if message.get("role") == "user" and content:
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            return "\n".join(part for part in parts if isinstance(part, str))
    return ""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Holds data rows that are evaluated and never trained.

    ``name`` is empty if the run has one set without a name. ``bad`` lists the data rows that cannot be used; they do
    not count as wrong answers. ``parts`` are the values of the rows' key "part" for which the figures are told apart.
    """

    name: str
    rows: Sequence[DataRow]
    bad: Sequence[BadRow] = ()
    parts: Sequence[str] = ()


class PromptSource(Protocol):
    """Holds data rows in an endless order: epochs follow each other, and each is shuffled by the run's seed.

    The same (source, seed, index) gives the same data row in any process. Data rows have numbers 0..len-1.
    """

    def __len__(self) -> int:
        """Returns the number of data rows for training, with those that cannot be used."""

    def number(self, index: int) -> int:
        """Returns the number of the data row at ``index`` of the endless order."""

    def row(self, index: int) -> DataRow:
        """Returns the data row at ``index`` of the endless order. Raises `BadRow` if it cannot be used."""

    def numbered(self, number: int) -> DataRow:
        """Returns the data row with this number. Raises `BadRow` if it cannot be used."""

    def where(self, number: int) -> str:
        """Returns file and line of the data row with this number, for an error about it."""

    def modality(self, number: int) -> str:
        """Returns the modality of the data row with this number, such as "text" or "video", usable or not."""

    def held_out(self) -> EvalSet:
        """Returns the held-out split, which shares no data row with `row`."""


class BaseDataSource(ABC):
    """Gives data rows by number; Relax makes the order, the epochs and the held-out rows.

    The same number gives the same row in every process and at any time, so a run can be resumed. Each rollout worker
    opens a source of its own, and calls it from one thread at a time.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows, at least 1."""

    @abstractmethod
    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Returns the row with this number, from 0 to len - 1.

        It has the keys ``data.prompt_key`` (text, or a list of messages) and ``data.answer_key`` (text or a number),
        and any other keys for the environment and the reward. An exception makes the row a bad one;
        ``data.max_bad_rows`` limits the share of bad rows.
        """

    def where(self, number: int) -> str:
        """Returns the origin of the row with this number, for an error about it."""
        return f"row {number}"

    def held_out(self) -> Sequence[Mapping[str, Any]] | None:
        """Returns the rows that are evaluated and never trained.

        None means the last ``data.eval_size`` rows, or the rows of ``data.eval_path``.
        """
        return None


@dataclass(frozen=True)
class DataSourceConfig:
    """Is the base of every data source's configuration."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DataSourceSpec:
    """Is the record of one data source.

    ``open(config)`` returns its rows; an exception ends the start of the run. ``check(config)`` raises ValueError for a
    configuration without meaning, before anything starts.
    """

    name: str
    summary: str
    config: type[DataSourceConfig]
    open: Callable[[Any], BaseDataSource]
    check: Callable[[Any], None] = lambda config: None

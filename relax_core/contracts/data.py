"""The contracts of prompt sources and of data-source plug-ins: access to data rows by index.

Therefore the data cursor is one integer, and a lost prompt can be read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.contracts.untrusted_values import clean_text

DataRow = Mapping[str, Any]  # at least "prompt" (str or list of messages) and "answer" (str)

BAD_ROW = "bad_row"
TOO_LONG = "too_long"


class BadRow(ValueError):
    """A data row is unusable; other rows of the source remain usable.

    ``reason`` is the reason in the ledger: ``too_long``, or ``bad_row:`` and one word. The text names the data row's
    file and line and the error.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(clean_text(text))
        self.reason = reason

    @staticmethod
    def because(word: str, text: str) -> BadRow:
        """Returns the error for a data row with wrong content; ``word`` names the wrong part."""
        return BadRow(f"{BAD_ROW}:{word}", text)


def question(prompt: Any) -> str:
    """Returns the text of a data row's prompt; for messages, the text of the last user message."""
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

    ``name`` is empty if the run has one set without a name. ``bad`` lists the data rows that cannot be used; the
    accuracy ignores them. ``parts`` lists values of the rows' key "part"; each value gets separate metrics.
    """

    name: str
    rows: Sequence[DataRow]
    bad: Sequence[BadRow] = ()
    parts: Sequence[str] = ()


class PromptSource(Protocol):
    """Holds data rows in an endless order of epochs, each shuffled by the run's seed.

    The data row depends only on (source, seed, index), not on the process. Data rows have numbers 0..len-1.
    """

    def __len__(self) -> int:
        """Returns the number of data rows for training, including unusable rows."""

    def number(self, index: int) -> int:
        """Returns the row number at ``index`` of the endless order."""

    def row(self, index: int) -> DataRow:
        """Returns the data row at ``index`` of the endless order. Raises `BadRow` if it cannot be used."""

    def numbered(self, number: int) -> DataRow:
        """Returns the data row with this number. Raises `BadRow` if it cannot be used."""

    def where(self, number: int) -> str:
        """Returns file and line of the data row with this number, for errors."""

    def modality(self, number: int) -> str:
        """Returns the modality of the data row with this number, such as "text" or "video", usable or not."""

    def held_out(self) -> EvalSet:
        """Returns the held-out split, which shares no data row with `row`."""


class BaseDataSource(ABC):
    """Returns data rows by number; Relax determines their order, the epochs and the held-out rows.

    A number gives the same row in every process and at any time, so a run can be resumed. Each rollout worker opens a
    separate source and calls it from one thread at a time.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows, at least 1."""

    @abstractmethod
    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Returns the row with this number, from 0 to len - 1.

        The row has the keys ``data.prompt_key`` (text, or a list of messages) and ``data.answer_key`` (text or a
        number). It may have further keys for the environment and the reward. If this method raises, the row is a bad
        row; ``data.max_bad_rows`` limits the share of bad rows.
        """

    def where(self, number: int) -> str:
        """Returns where the row with this number comes from, for errors."""
        return f"row {number}"

    def held_out(self) -> Sequence[Mapping[str, Any]] | None:
        """Returns the rows that are evaluated and never trained.

        None means the last ``data.eval_size`` rows, or the rows of ``data.eval_path``.
        """
        return None


@dataclass(frozen=True)
class DataSourceConfig:
    """Holds the settings that all data sources share."""

    name: str


@dataclass(frozen=True, kw_only=True)
class DataSourceSpec:
    """Describes one data source.

    ``open(config)`` returns the open data source; an exception aborts the start of the run. ``check(config)`` raises
    ValueError for an invalid configuration, before anything starts.
    """

    name: str
    summary: str
    config: type[DataSourceConfig]
    open: Callable[[Any], BaseDataSource]
    check: Callable[[Any], None] = lambda config: None

"""Defines a metrics sink, which takes the records that a run reports, and stores or sends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

TextCell = str | int | float | bool | None
SAMPLED_MARKS = ("⟦", "⟧")  # they stand around what the model sampled, in the texts of episodes of several turns


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True, tag="numbers", tag_field="type"):
    """Holds the numbers that ``source`` reported for ``step``. ``time_s`` is Unix time, in seconds."""

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True, tag="texts", tag_field="type"):
    """Holds texts of one ``kind`` at ``step``.

    Each row is a dict. A row of kind "eval" has prompt, answer (the expected one), response and exact, and the name of
    the evaluation set if the set has one. The response of an episode of several turns is the whole conversation, one
    message after the other, with `SAMPLED_MARKS` around what the model sampled, and how it ended. A row of
    `bad_rows_kind` has row (the number of the data row), reason and text.
    """

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True, tag="histogram", tag_field="type"):
    """Holds the distribution of the values of ``name`` that ``source`` had at ``step``.

    ``counts[k]`` values lie above ``limits[k - 1]`` (without a lower limit for k = 0) and up to ``limits[k]``.
    ``total`` and ``total_of_squares`` are sums over the values. ``time_s`` is Unix time, in seconds.
    """

    source: str
    step: int
    time_s: float
    name: str
    limits: list[float]
    counts: list[int]
    least: float
    largest: float
    total: float
    total_of_squares: float


Record = MetricRecord | TextRecord | HistogramRecord


@dataclass(frozen=True, kw_only=True)
class SinkStart:
    """Holds what a sink is opened with. ``run_dir`` is the run's folder, which has a ``config.yaml``."""

    run_dir: Path


class BaseSink(ABC):
    """Is an open sink in a process of its own, whose methods are called one after the other, so each of them may wait.

    If a method raises, or the process dies or hangs, the run reports it and goes on. The batch stays in the run's event
    log and is given again, after growing pauses. So a sink may get a record twice, and loses none.
    """

    @abstractmethod
    def write(self, batch: Sequence[Record]) -> None:
        """Takes records in the order in which they came, and ignores kinds of records that it does not know."""

    def flush(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Passes on what the sink has collected. It is called behind each batch."""

    def close(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Ends the sink. It is called once, when the run has ended and every record was written."""


@dataclass(frozen=True)
class SinkConfig:
    """Is the base of every sink's configuration."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """Is the record of one metrics sink.

    ``open(start, config)`` returns the open sink. It is called with the first records, and again if it raises, if its
    process has died, and in a resumed run, so a sink appends to what it finds. ``check(config)`` raises ValueError for
    a configuration without meaning, before anything starts.
    """

    name: str
    summary: str
    config: type[SinkConfig]
    open: Callable[[SinkStart, Any], BaseSink]
    check: Callable[[Any], None] = lambda config: None

"""What a metrics sink is: it takes the records that a run reports, and keeps or sends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

TextCell = str | int | float | bool | None


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that ``source`` reported for ``step``. ``time_s``: Unix time, in seconds."""

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of one ``kind`` at ``step``. Rows of kind "eval" have prompt, answer (expected), response and exact, and
    the evaluation set's name where it has one; those of `bad_rows_kind` have row (its number), reason and text.
    """

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the values of ``name`` that ``source`` had at ``step`` were distributed: ``counts[k]`` of them lie above
    ``limits[k - 1]`` (any number, for k = 0) and up to ``limits[k]``. ``total`` and ``total_of_squares``: sums over the
    values. ``time_s``: Unix time, in seconds.
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
    """What a sink is opened with. ``run_dir``: the run's folder, which has its configuration as ``config.yaml``."""

    run_dir: Path


class BaseSink(ABC):
    """A sink that is open. One thread of the sink's own calls all of its methods, so each of them may wait.

    What a method raises is reported once and counted as records that this sink lacks. The batch is then dropped and
    the next one is tried. The run and the other sinks go on. A sink that hangs is treated in the same way: records
    wait for it up to a limit, and newer ones are dropped.
    """

    @abstractmethod
    def write(self, batch: Sequence[Record]) -> None:
        """Takes records in the order in which they came. A sink leaves out the kinds of records that it does not
        know.
        """

    def flush(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Passes on what the sink has collected. It is called when no further record waits."""

    def close(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Ends the sink. It is called once, when the run has ended and every record was written."""


@dataclass(frozen=True)
class SinkConfig:
    """The base of every sink's configuration."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """One metrics sink. ``open(start, config)`` returns the open sink. It is called in the sink's own thread, with the
    first records, and again where it raises. A metrics service that was restarted and a run that is resumed open the
    sink again, so a sink adds to what it finds. ``check(config)`` raises ValueError for a configuration that makes no
    sense, before anything starts.
    """

    name: str
    summary: str
    config: type[SinkConfig]
    open: Callable[[SinkStart, Any], BaseSink]
    check: Callable[[Any], None] = lambda config: None

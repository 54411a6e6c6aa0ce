"""The contract of a metrics sink, which stores or sends the metric, text and histogram records of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

TextCell = str | int | float | bool | None
SAMPLED_MARKS = ("⟦", "⟧")  # these marks enclose sampled text in the texts of multi-turn episodes


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True, tag="numbers", tag_field="type"):
    """Holds the numbers that ``source`` reported for ``step``. ``time_s`` is Unix time, in seconds."""

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True, tag="texts", tag_field="type"):
    """Holds texts of one ``kind`` at ``step``.

    Each row is a dict. A row of kind "eval" has the keys prompt, answer (the reference answer), response and exact. It
    also has the name of the evaluation set if the set has a name. The response of a multi-turn episode is the whole
    conversation, message by message, with `SAMPLED_MARKS` around sampled text, and the reason why the episode ended. A
    row of `bad_rows_kind` has the keys row (the number of the data row), reason and text.
    """

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True, tag="histogram", tag_field="type"):
    """Holds the distribution of the values of ``name`` that ``source`` reported for ``step``.

    ``counts[k]`` is the number of values above ``limits[k - 1]`` (no lower limit for k = 0) and at most ``limits[k]``.
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
    """Holds the inputs to open a sink. ``run_dir`` is the run's folder, which has a ``config.yaml``."""

    run_dir: Path


class BaseSink(ABC):
    """Declares an open sink. A sink runs in a separate process. One method is called at a time, so a method may block.

    If a method raises, or the process dies or hangs, the run reports the failure and continues. The batch stays in the
    run's event log and is sent again after increasing pauses. So a sink gets every record at least once, and may get a
    record twice.
    """

    @abstractmethod
    def write(self, batch: Sequence[Record]) -> None:
        """Stores or sends records, in order of arrival. Ignores unknown kinds of records."""

    def flush(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Flushes buffered records. Relax calls this method after each batch."""

    def close(self) -> None:  # noqa: B027  # most sinks have nothing to do here
        """Closes the sink. Relax calls this method once, when the run has ended and all records were written."""


@dataclass(frozen=True)
class SinkConfig:
    """Holds the settings that all sinks share."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """Describes one metrics sink.

    ``open(start, config)`` returns the open sink. It is called before the first records. It is called again after it
    raised, after the sink's process died, and in a resumed run, so a sink must append to its existing output.
    ``check(config)`` raises ValueError for an invalid configuration, before anything starts.
    """

    name: str
    summary: str
    config: type[SinkConfig]
    open: Callable[[SinkStart, Any], BaseSink]
    check: Callable[[Any], None] = lambda config: None

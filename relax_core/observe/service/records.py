"""Defines the records that a run reports: numbers of a step, texts such as an evaluation's answers, and histograms."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ACTOR = "actor"  # source of one record a train step
ROLLOUT = "rollout"  # source of one record a prompt batch of generation
EVAL = "eval"  # source of one record an evaluation; its step is the weight version
LEDGER = "ledger"  # source of the ledger's drop counts, one record a train step from the first dropped sample on
RUN = "run"  # source of events of the run itself
RESUMED = "resumed"
BAD_ROWS = "bad_rows"  # kind of texts about data rows that were skipped


def bad_rows_kind(worker: int) -> str:
    """Returns the kind of the texts in which a rollout worker names the data rows that it skipped."""
    return f"{BAD_ROWS}-{worker}" if worker else BAD_ROWS


TextCell = str | int | float | bool | None


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the numbers that ``source`` reported for ``step``.

    ``time_s`` is Unix time, in seconds.
    """

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Holds texts of one ``kind`` at ``step``.

    Each row is a dict. A row of kind "eval" has prompt, answer (the expected one), response and exact, and the name of
    the evaluation set if the set has one. A row of `bad_rows_kind` has row (the number of the data row), reason and
    text.
    """

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True):
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


def metric_record(source: str, step: int, values: Mapping[str, float]) -> MetricRecord:
    """Makes a record with the current time. Raises TypeError or ValueError if a value is not a number."""
    numbers = {name: float(value) for name, value in values.items()}
    return MetricRecord(source=source, step=step, time_s=time.time(), values=numbers)


def text_record(kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> TextRecord:
    """Makes a record with the current time."""
    return TextRecord(kind=kind, step=step, time_s=time.time(), rows=[dict(row) for row in rows])


def record_key(record: Record) -> tuple[str, int, float]:
    """Returns a key that is unique among the records of the run."""
    match record:
        case MetricRecord():
            return record.source, record.step, record.time_s
        case TextRecord():
            return f"texts of {record.kind}", record.step, record.time_s
        case HistogramRecord():
            return f"histogram of {record.source}/{record.name}", record.step, record.time_s


def is_resume(record: MetricRecord) -> bool:
    """Is True if the record marks that the run went on from a checkpoint of ``record.step`` train steps."""
    return record.source == RUN and RESUMED in record.values


def without_undone(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """Returns the valid records. A resume at step s undoes the earlier records for step s and later steps."""
    kept: list[MetricRecord] = []
    for record in records:
        if is_resume(record):
            kept = [earlier for earlier in kept if earlier.step < record.step]
        else:
            kept.append(record)
    return kept


def last_step(records: Iterable[MetricRecord]) -> int:
    """Returns the largest number of train steps that were reported as done, or 0."""
    return max((record.step + 1 for record in records if record.source == ACTOR), default=0)


def by_step(records: Iterable[MetricRecord], source: str) -> dict[int, dict[str, float]]:
    """Returns step → values of ``source``, in order of step. Of several records of a step the last counts."""
    values = {record.step: record.values for record in records if record.source == source}
    return dict(sorted(values.items()))

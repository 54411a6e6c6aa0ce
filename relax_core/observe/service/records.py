"""What is reported while a run goes on: numbers a step, texts (answers of an evaluation), and histograms."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ACTOR = "actor"  # once a train step
ROLLOUT = "rollout"  # once a prompt batch of generation
EVAL = "eval"  # once an evaluation, step = weight version
LEDGER = "ledger"  # what the data bus has persisted, once a train step as long as samples were dropped
RUN = "run"  # what happened to the run itself
RESUMED = "resumed"
BAD_ROWS = "bad_rows"  # texts: data rows that were left out


def bad_rows_kind(worker: int) -> str:
    """The kind of the texts in which a rollout worker names the data rows that it left out."""
    return f"{BAD_ROWS}-{worker}" if worker else BAD_ROWS


TextCell = str | int | float | bool | None


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that ``source`` reported for ``step``. ``time_s``: Unix time, in seconds."""

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of one ``kind`` at ``step``. Rows of kind "eval" have prompt, answer (expected), response and exact, and
    the evaluation set's name where it has one; those of `bad_rows_kind` have row (its number), reason and text."""

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


class HistogramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the values of ``name`` that ``source`` had at ``step`` were distributed: ``counts[k]`` of them lie above
    ``limits[k - 1]`` (any number, for k = 0) and up to ``limits[k]``. ``total`` and ``total_of_squares``: sums over the
    values. ``time_s``: Unix time, in seconds."""

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
    """A record of now. Raises TypeError or ValueError for what is not a number."""
    numbers = {name: float(value) for name, value in values.items()}
    return MetricRecord(source=source, step=step, time_s=time.time(), values=numbers)


def text_record(kind: str, step: int, rows: Sequence[Mapping[str, TextCell]]) -> TextRecord:
    """A record of now."""
    return TextRecord(kind=kind, step=step, time_s=time.time(), rows=[dict(row) for row in rows])


def record_key(record: Record) -> tuple[str, int, float]:
    """Tells a record from every other one of the run."""
    match record:
        case MetricRecord():
            return record.source, record.step, record.time_s
        case TextRecord():
            return f"texts of {record.kind}", record.step, record.time_s
        case HistogramRecord():
            return f"histogram of {record.source}/{record.name}", record.step, record.time_s


def is_resume(record: MetricRecord) -> bool:
    """Says that the run went on from a checkpoint of ``record.step`` train steps."""
    return record.source == RUN and RESUMED in record.values


def without_undone(records: Iterable[MetricRecord]) -> list[MetricRecord]:
    """The records that still hold: a resume at step s undoes whatever was reported before it for s and later steps."""
    kept: list[MetricRecord] = []
    for record in records:
        if is_resume(record):
            kept = [earlier for earlier in kept if earlier.step < record.step]
        else:
            kept.append(record)
    return kept


def last_step(records: Iterable[MetricRecord]) -> int:
    """Train steps that were reported as done, as the newest report has it; 0 where there was none."""
    return max((record.step + 1 for record in records if record.source == ACTOR), default=0)


def by_step(records: Iterable[MetricRecord], source: str) -> dict[int, dict[str, float]]:
    """Values of ``source``, one entry a step in order of step; of a step told twice the later one."""
    values = {record.step: record.values for record in records if record.source == source}
    return dict(sorted(values.items()))

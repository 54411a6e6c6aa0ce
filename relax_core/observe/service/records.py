"""Defines the records that a run reports: numbers of a step, texts such as an evaluation's answers, and histograms."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from relax_core.contracts.sink import HistogramRecord as HistogramRecord
from relax_core.contracts.sink import MetricRecord as MetricRecord
from relax_core.contracts.sink import Record as Record
from relax_core.contracts.sink import TextCell as TextCell
from relax_core.contracts.sink import TextRecord as TextRecord

ACTOR = "actor"  # source of one record a train step
ROLLOUT = "rollout"  # source of one record a prompt batch of generation
EVAL = "eval"  # source of one record an evaluation; its step is the weight version
RANK = "rank"  # source of the times of the trainer's ranks, one record a train step
PROCESS = "process"  # source of what the processes of the run use, one record each some seconds
LEDGER = "ledger"  # source of the ledger's drop counts, one record a train step from the first dropped sample on
RUN = "run"  # source of events of the run itself
RESUMED = "resumed"
BAD_ROWS = "bad_rows"  # kind of texts about data rows that were skipped


def bad_rows_kind(worker: int) -> str:
    """Returns the kind of the texts in which a rollout worker names the data rows that it skipped."""
    return f"{BAD_ROWS}-{worker}" if worker else BAD_ROWS


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


def by_step(records: Iterable[MetricRecord], source: str) -> dict[int, dict[str, float]]:
    """Returns step → values of ``source``, in order of step. Of several records of a step the last counts."""
    values = {record.step: record.values for record in records if record.source == source}
    return dict(sorted(values.items()))

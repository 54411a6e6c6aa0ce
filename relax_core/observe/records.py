"""What is reported while a run goes on: numbers a step, and texts (answers of an evaluation)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

ACTOR = "actor"  # once a train step
ROLLOUT = "rollout"  # once a burst of generation
EVAL = "eval"  # once an evaluation, step = weight version
RUN = "run"  # what happened to the run itself
RESUMED = "resumed"

TextCell = str | int | float | bool | None


class MetricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that ``source`` reported for ``step``. ``time_s``: Unix time, in seconds."""

    source: str
    step: int
    time_s: float
    values: dict[str, float]


class TextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of one ``kind`` at ``step``. Rows of kind "eval" have prompt, answer (expected), response and exact."""

    kind: str
    step: int
    time_s: float
    rows: list[dict[str, TextCell]]


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

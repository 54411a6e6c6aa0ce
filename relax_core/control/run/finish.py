"""Collects a run's records at its end and writes its results: summary.json, the curves and the final report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.contracts.bus import BusProgress
from relax_core.observe.curves import CURVES_FILE, draw_picture, plot_curves
from relax_core.observe.report import CHECKPOINTS_FOLDER, print_report, report_console
from relax_core.observe.service.metrics_actor import MetricsClient, MetricsUnavailable
from relax_core.observe.service.metrics_service import MetricsHealth
from relax_core.observe.service.records import ACTOR, MetricRecord, TextCell, TextRecord, bad_rows_kind
from relax_core.observe.service.sinks import read_metrics, read_texts
from relax_core.observe.summary import build_summary, write_summary
from relax_core.train.checkpoints.checkpoint_store import unremoved


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Holds all records of a run.

    ``bad_rows`` are the first few data rows that were skipped (`relax_core.observe.service.records.TextRecord`).
    """

    records: list[MetricRecord]
    texts: list[TextRecord]
    bad_rows: list[dict[str, TextCell]]
    progress: BusProgress
    health: MetricsHealth


def collect(metrics: MetricsClient, progress: BusProgress, *, run_dir: Path, rollout_workers: int) -> RunRecords:
    """Reads the records and closes the metrics service, so that every sink is on disk.

    If the service does not answer, it reads the records in the run's files and adds that to the problems.
    """
    kinds = [bad_rows_kind(worker) for worker in range(rollout_workers)]
    try:
        _, records = metrics.poll(0)
        texts, bad_rows = metrics.texts("eval"), _bad_rows(metrics.texts(kind) for kind in kinds)
        health = metrics.close()
        return RunRecords(records=records, texts=texts, bad_rows=bad_rows, progress=progress, health=health)
    except MetricsUnavailable as error:
        problem = f"{error}; the summary has only what was written to the run's folder"
        kept = read_texts(run_dir)
        return RunRecords(
            records=read_metrics(run_dir),
            texts=[text for text in kept if text.kind == "eval"],
            bad_rows=_bad_rows([text for text in kept if text.kind == kind] for kind in kinds),
            progress=progress,
            health=MetricsHealth(problems=[problem], dropped={}),
        )


def _bad_rows(reported: Iterable[list[TextRecord]]) -> list[dict[str, TextCell]]:
    """Returns the data rows in each rollout worker's newest texts. A row that several workers skipped appears once."""
    rows = {row["row"]: row for texts in reported if texts for row in texts[-1].rows}
    return list(rows.values())


def write_end(run_dir: Path, end: RunRecords, *, meta: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Writes summary.json and the curves, and returns the summary. ``started`` is the Unix time of the run's start."""
    steps = [record.time_s for record in end.records if record.source == ACTOR and record.time_s >= started]
    first_step_s = steps[0] - started if steps else None
    own = {"first_step_s": first_step_s, "records_dropped": end.health.dropped, "bad_rows": end.bad_rows}
    summary = build_summary(end.records, progress=end.progress, meta={**meta, **own})
    write_summary(run_dir, summary)
    if any(record.source == ACTOR for record in end.records):
        _, problem = draw_picture(lambda: plot_curves(end.records, run_dir / CURVES_FILE))
        if problem is not None:
            print(f"relax: {CURVES_FILE} is left out: {problem}", file=sys.stderr)
    return summary


def show_end(run_dir: Path, end: RunRecords, summary: Mapping[str, Any]) -> None:
    """Prints the report, the skipped data rows and the problems of the metrics sinks."""
    first = end.texts[0].rows if end.texts else []
    newest = end.texts[-1].rows if end.texts else []
    print_report(report_console(), run_dir, summary, first, newest)
    for row in end.bad_rows:
        print(f"relax: data row {row['row']} was left out ({row['reason']}): {row['text']}", file=sys.stderr)
    for problem in end.health.problems:
        print(f"relax: {problem}", file=sys.stderr)
    for folder in unremoved(run_dir / CHECKPOINTS_FOLDER):
        print(f"relax: {folder} is an old checkpoint that cannot be removed; remove it by hand", file=sys.stderr)

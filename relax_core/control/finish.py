"""Collects a run's records at its end and writes its results: summary.json, the curves and the final report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.contracts.bus import BusProgress
from relax_core.observe.event_log import (
    ACTOR,
    EVAL,
    EventReader,
    EventWriter,
    GapRecord,
    MetricRecord,
    TextCell,
    TextRecord,
    bad_rows_kind,
)
from relax_core.observe.report import (
    CHECKPOINTS_FOLDER,
    CURVES_FILE,
    draw_picture,
    plot_curves,
    print_report,
    report_console,
)
from relax_core.observe.summary import build_summary, write_summary
from relax_core.observe.trackers.tracker_process import Trackers
from relax_core.train.checkpoints.checkpoint_store import unremoved

CLOSE_S = 10.0  # what a tracker has not taken by then waits in the log


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Holds what the log of a run has at its end.

    ``texts`` are the first and the newest answers of evaluations. ``bad_rows`` are the first few data rows that were
    skipped (`relax_core.observe.event_log.TextRecord`). ``problems`` has a sentence for each problem of the log and the
    trackers, and ``lacking`` maps each tracker, and "events" for the log itself, to the number of records that it
    lacks.
    """

    records: list[MetricRecord]
    texts: list[TextRecord]
    bad_rows: list[dict[str, TextCell]]
    progress: BusProgress
    problems: list[str]
    lacking: dict[str, int]


def collect(
    events: EventWriter, trackers: Trackers, progress: BusProgress, *, run_dir: Path, rollout_workers: int
) -> RunRecords:
    """Writes what the controller still has to report, reads the log and ends the trackers."""
    problems: list[str] = []
    try:
        events.close(timeout_s=CLOSE_S)
    except TimeoutError as error:
        problems.append(str(error))
    reader, records, gaps = EventReader(run_dir), list[MetricRecord](), 0
    texts: dict[str, list[TextRecord]] = {}
    for event in reader.each():
        match event:
            case MetricRecord():
                records.append(event)
            case TextRecord():
                texts.setdefault(event.kind, [])[1:] = [event]  # the first and the newest
            case GapRecord():
                gaps += event.records
    lines, lacking = trackers.close(records=reader.count, timeout_s=CLOSE_S)
    rows = {
        row["row"]: row  # one that several workers skipped is named once
        for kind in map(bad_rows_kind, range(rollout_workers))
        for text in texts.get(kind, [])[-1:]
        for row in text.rows
    }
    return RunRecords(
        records=records,
        texts=texts.get(EVAL, []),
        bad_rows=list(rows.values()),
        progress=progress,
        problems=[*problems, *reader.problems.values(), *lines],
        lacking=({"events": gaps} if gaps else {}) | lacking,
    )


def write_end(run_dir: Path, end: RunRecords, *, meta: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Writes summary.json and the curves, and returns the summary. ``started`` is the Unix time of the run's start."""
    steps = [record.time_s for record in end.records if record.source == ACTOR and record.time_s >= started]
    first_step_s = steps[0] - started if steps else None
    own = {"first_step_s": first_step_s, "records_dropped": end.lacking, "bad_rows": end.bad_rows}
    summary = build_summary(end.records, progress=end.progress, meta={**meta, **own})
    write_summary(run_dir, summary)
    if any(record.source == ACTOR for record in end.records):
        _, problem = draw_picture(lambda: plot_curves(end.records, run_dir / CURVES_FILE))
        if problem is not None:
            print(f"relax: {CURVES_FILE} is left out: {problem}", file=sys.stderr)
    return summary


def show_end(run_dir: Path, end: RunRecords, summary: Mapping[str, Any]) -> None:
    """Prints the report, the skipped data rows and the problems of the trackers."""
    first = end.texts[0].rows if end.texts else []
    newest = end.texts[-1].rows if end.texts else []
    print_report(report_console(), run_dir, summary, first, newest)
    for row in end.bad_rows:
        print(f"relax: data row {row['row']} was left out ({row['reason']}): {row['text']}", file=sys.stderr)
    for problem in end.problems:
        print(f"relax: {problem}", file=sys.stderr)
    for folder in unremoved(run_dir / CHECKPOINTS_FOLDER):
        print(f"relax: {folder} is an old checkpoint that cannot be removed; remove it by hand", file=sys.stderr)

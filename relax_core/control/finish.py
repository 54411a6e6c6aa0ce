"""Collects a run's records at its end and writes its results: summary.json, the curves and the final report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_core.bus.ledger_reader import LedgerFile
from relax_core.config.engine_checks import offline_rows
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.bus import BusProgress
from relax_core.control.recoveries import RunFailed
from relax_core.control.run_alarms import RunAlarms
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
from relax_core.server.engine_order_store import order_history
from relax_core.train.checkpoints.checkpoint_store import unremoved

FAILURE_LOG = "failure.log"
CLOSE_S = 10.0  # seconds; records that a tracker has not read by then remain in the event log


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Holds the content of a run's event log at its end.

    ``texts`` has the first and the newest answers of evaluations. ``bad_rows`` has the first few skipped data rows
    (`relax_core.observe.event_log.TextRecord`). ``problems`` has sentences about problems of the event log and the
    trackers. ``lacking`` maps each tracker, and "events" for the event log, to the number of missing records.
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
    """Flushes the controller's records, reads the log and ends the trackers."""
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
                texts.setdefault(event.kind, [])[1:] = [event]  # the first evaluation and the newest evaluation
            case GapRecord():
                gaps += event.records
    lines, lacking = trackers.close(records=reader.count, timeout_s=CLOSE_S)
    rows = {
        row["row"]: row  # reports a row once, even if several workers skipped it
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
    """Writes summary.json and the curves. Returns the summary. ``started`` is the Unix time of the run's start."""
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
        print(f"relax: data row {row['row']} was skipped ({row['reason']}): {row['text']}", file=sys.stderr)
    for problem in end.problems:
        print(f"relax: {problem}", file=sys.stderr)
    for folder in unremoved(run_dir / CHECKPOINTS_FOLDER):
        print(f"relax: {folder} is an old checkpoint that cannot be removed; remove it by hand", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Describes the end of the run. ``records`` is None if the run failed before its event log existed."""

    word: Literal["finished", "stopped", "failed"]
    failure: RunFailed | None = None
    records: RunRecords | None = None
    recoveries: Sequence[Mapping[str, Any]] = ()
    stragglers: Sequence[Mapping[str, Any]] = ()


def notify_end(alarms: RunAlarms, outcome: Outcome, run_dir: Path) -> None:
    """Sends the notification about the run's end. Prints the last lines of the alarms."""
    why = f"{outcome.failure}" if outcome.failure is not None else f"in {run_dir}"
    for line in alarms.close(outcome.word, why):
        print(f"relax: {line}", file=sys.stderr)


def write_outcome(outcome: Outcome, config: RelaxConfig, *, started: float) -> dict[str, Any]:
    """Writes the summary and the curves of a run that has records, and returns the summary."""
    assert outcome.records is not None
    word = outcome.word if outcome.failure is None else f"{outcome.word}: {outcome.failure}"
    meta = {"outcome": word, "wall_s": time.time() - started, "overrides": sys.argv[1:]}
    # Without engines, a single feeder determines the order of the rows, whatever their timing.
    repeatable = config.repeatable or (offline_rows(config) is not None and config.rollout.workers == 1)
    meta |= {"seed": config.seed, "repeatable": repeatable, "recoveries": list(outcome.recoveries)}
    meta |= {"keep_best": config.run.keep_best, "stragglers": list(outcome.stragglers)}
    if config.gateway.name != "none":
        run_dir = Path(config.run.dir)
        meta |= order_history(run_dir, sampled=_sampled(run_dir), repeatable=repeatable)
    if (sandbox := getattr(config.env, "sandbox", None)) is not None:  # the env runs the model's code
        meta["sandbox"] = sandbox
    return write_end(Path(config.run.dir), outcome.records, meta=meta, started=started)


def _sampled(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Maps each engine to (samples, tokens) according to the ledger; empty without a ledger."""
    try:
        with LedgerFile(run_dir / "ledger.sqlite") as ledger:
            return {engine: (share.samples, share.tokens) for engine, share in ledger.engine_shares().items()}
    except FileNotFoundError:
        return {}


def report_failure(outcome: Outcome, config: RelaxConfig, *, started: float) -> None:
    """Prints the cause. Writes the traceback to the logs and writes a summary, if the disk is not full."""
    assert outcome.failure is not None
    log = Path(config.run.dir) / "logs" / FAILURE_LOG
    print(f"relax: failed: {outcome.failure}", file=sys.stderr)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{outcome.failure}\n\n{outcome.failure.log}\n", encoding="utf-8")
        if outcome.records is not None:
            write_outcome(outcome, config, started=started)
        print(f"relax: more in {log}", file=sys.stderr)
    except OSError as error:
        print(f"relax: the logs and the summary are not complete: {error}", file=sys.stderr)

"""`relax trace RUN [--steps A:B] [--format F] [--out FILE]` writes a run's timeline as a trace file.

The trace has these lanes: the trainer with the parts of its steps, each rank, each rollout worker, each engine, weight
updates, evaluations, restarts, recoveries after a fault, and orders for engines. The lanes are computed from the run's
files, without any cost for the run. Open the format chrome in ui.perfetto.dev or chrome://tracing. An OpenTelemetry
collector accepts the format otlp as the body of POST /v1/traces.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.contracts.output_path import check_output_file, next_free
from relax_core.observe.event_log import each_metric
from relax_core.observe.standard_streams import unread_streams
from relax_core.server.run_events import RunSeries
from relax_core.server.run_timeline import WRITERS, all_spans, event_spans, read_orders

HOW = {
    "chrome": "Open it at https://ui.perfetto.dev or in chrome://tracing.",
    "otlp": "Send it to a collector: curl -H 'Content-Type: application/x-protobuf' --data-binary @FILE URL/v1/traces.",
}


_FIX = "Give the folder of a run, and steps A:B with A below B."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--steps", default=":", help="train steps A:B, without B; both are optional")
    parser.add_argument("--format", choices=WRITERS, default="chrome", help="default: chrome")
    names = ", ".join(name for name, _ in WRITERS.values())
    parser.add_argument(
        "--out", type=Path, help=f"a new file, by default {names} in the working folder; - writes to stdout"
    )
    given = parser.parse_args(arguments)
    to_output = str(given.out) == "-"
    try:
        if given.out is not None and not to_output:
            check_output_file(given.out, option="--out")
        first, behind = steps_of(given.steps)
    except ValueError as error:
        print(f"relax trace: {error}", file=sys.stderr)
        return 2
    series = RunSeries()
    try:
        for record in each_metric(given.run):
            series.add(record)
    except ValueError as error:
        print(f"relax trace: {error}", file=sys.stderr)
    spans = [span for span in all_spans(series.timed) if first <= span.step < behind]
    if not spans:
        print(
            f"relax trace: the event log of {given.run} has no train steps of --steps={given.steps}. {_FIX}",
            file=sys.stderr,
        )
        return 1
    events, problems = event_spans(given.run, series.timed, read_orders(given.run))
    for words in problems:
        print(f"relax trace: {words}", file=sys.stderr)
    from_s = min(span.start_s for span in spans) if first else -math.inf
    until_s = max(span.end_s for span in spans) if behind < math.inf else math.inf
    spans += [span for span in events if span.end_s >= from_s and span.start_s <= until_s]
    name, write = WRITERS[given.format]
    try:
        data = write(spans, run=given.run.resolve().name)
    except ValueError as error:
        print(f"relax trace: {error}", file=sys.stderr)
        return 2
    if to_output:
        sys.stdout.buffer.write(data)
        return 0
    out = given.out or next_free(Path(name))
    out.write_bytes(data)
    print(f"{out}: {len(spans)} spans, {len(data)} bytes. {HOW[given.format]}")
    return 0


def steps_of(words: str) -> tuple[int, float]:
    """Returns the first step A and the end B (exclusive) of "A:B". Raises ValueError for other texts."""
    first, colon, behind = words.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, behind)):
        raise ValueError(f"--steps={words}: give A:B with whole numbers, such as 100:120, 100: or :20.")
    return int(first or 0), float(behind or "inf")


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())

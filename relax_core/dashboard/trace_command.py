"""`relax trace RUN [--steps A:B] [--out FILE]` writes what a run did over time as a trace in Chrome's JSON format.

ui.perfetto.dev and chrome://tracing open it. The lanes are the trainer with the parts of its steps, each of its ranks,
each rollout worker, each engine, the pushes of weights and the evaluations. It is made of the run's metrics.jsonl, so
it costs the run nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_core.dashboard.run_series import RunSeries
from relax_core.dashboard.timeline.run_timeline import PARTS_LANE, TRAINER_LANE, all_spans
from relax_core.dashboard.timeline.timeline_spans import Span

TRACE = "trace.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--steps", default=":", help="train steps A:B, B not included; either may be left out")
    parser.add_argument("--out", type=Path, help=f"by default {TRACE} in the working folder; - writes to the output")
    given = parser.parse_args(arguments)
    try:
        first, behind = steps_of(given.steps)
    except ValueError as error:
        print(f"relax trace: {error}", file=sys.stderr)
        return 2
    series = RunSeries(given.run)
    while series.refresh():
        pass
    spans = [span for span in all_spans(series.timed) if first <= span.step < behind]
    if not spans:
        print(f"relax trace: {given.run} has no metrics.jsonl with such train steps.", file=sys.stderr)
        return 1
    data = msgspec.json.encode({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"})
    if str(given.out) == "-":
        sys.stdout.buffer.write(data)
        return 0
    out = given.out or Path(TRACE)
    out.write_bytes(data)
    print(f"{out}: {len(spans)} spans. Open it at https://ui.perfetto.dev or in chrome://tracing.")
    return 0


def steps_of(words: str) -> tuple[int, float]:
    """Returns the first step of "A:B", and the step behind the last one. Raises ValueError for anything else."""
    first, colon, behind = words.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, behind)):
        raise ValueError(f"--steps={words}: give A:B with whole numbers, such as 100:120, 100: or :20.")
    return int(first or 0), float(behind or "inf")


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the events of Chrome's trace format, times in whole microseconds since the first span.

    Spans of one row are nested or apart, as the format demands: a lane whose spans overlap has several rows.
    """
    start_s = min(span.start_s for span in spans)

    def us(time_s: float) -> int:
        return round(1e6 * (time_s - start_s))

    rows: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for lane, place, start, end, span in _placed(spans, us):
        row = rows.setdefault((lane, place), len(rows) + 1)
        event = {"name": span.name, "cat": span.lane, "pid": 1, "tid": row, "ts": start}
        shape = {"ph": "X", "dur": end - start} if end > start else {"ph": "i", "s": "t"}
        events.append({**event, **shape, "args": {"step": span.step, **span.values}})
    names = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": row,
            "args": {"name": f"{lane} ({place + 1})" if place else lane},
        }
        for (lane, place), row in rows.items()
    ]
    return [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "Relax"}}, *names, *events]


def _placed(spans: Iterable[Span], us: Callable[[float], int]) -> Iterator[tuple[str, int, int, int, Span]]:
    """Yields lane, row, start, end and span; the parts of a step stand in the trainer's row and inside their step.

    The clocks of two records differ by parts of a millisecond, so a step begins where the one before has ended.
    """
    ends: dict[str, list[int]] = {}
    step = (0, 0)
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        start, end = us(span.start_s), us(span.end_s)
        if span.lane == PARTS_LANE:
            start, end = (min(max(time, step[0]), step[1]) for time in (start, end))
            yield TRAINER_LANE, 0, start, end, span
            continue
        taken = ends.setdefault(span.lane, [])
        if span.lane == TRAINER_LANE:
            start = max(start, taken[0] if taken else start)
            end = max(start, end)
            step, place = (start, end), 0
        else:
            place = next((place for place, before in enumerate(taken) if before <= start), len(taken))
        taken[place : place + 1] = [end]
        yield span.lane, place, start, end, span


if __name__ == "__main__":
    sys.exit(main())

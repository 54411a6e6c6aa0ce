"""Writes the spans of a run as a trace: in Chrome's JSON format, and as OTLP with OpenTelemetry's own classes.

Each format gets the same rows. Spans of one row are nested or apart: a lane whose spans overlap has several rows, and
the parts of a train step stand in the trainer's row, inside their step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from relax_core.server.run_timeline import PARTS_LANE, TRAINER_LANE, Span

PROCESS = 1  # the number of the one process of a trace in Chrome's format
SCOPE = "relax trace"


class PlacedSpan(NamedTuple):
    """Is a span in a row: ``lane`` and ``place`` name the row, and times are whole microseconds since the first span.

    ``parent`` is the train step of which the span is a part, None for others.
    """

    lane: str
    place: int
    start_us: int
    end_us: int
    span: Span
    parent: PlacedSpan | None = None

    @property
    def row(self) -> str:
        """Returns the name of the row."""
        return f"{self.lane} ({self.place + 1})" if self.place else self.lane


def chrome_trace(spans: Sequence[Span], *, run: str) -> bytes:
    """Returns the trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open."""
    return msgspec.json.encode({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"})


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the events of Chrome's trace format, times in whole microseconds since the first span."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for one in placed_spans(spans):
        row = rows.setdefault(one.row, len(rows) + 1)
        event = {"name": one.span.name, "cat": one.span.lane, "pid": PROCESS, "tid": row, "ts": one.start_us}
        shape = {"ph": "X", "dur": one.end_us - one.start_us} if one.end_us > one.start_us else {"ph": "i", "s": "t"}
        events.append({**event, **shape, "args": {"step": one.span.step, **one.span.values}})
    names = [
        {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    return [{"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "Relax"}}, *names, *events]


def otlp_trace(spans: Sequence[Span], *, run: str) -> bytes:
    """Returns the trace as OTLP, the body of ``POST /v1/traces`` with the content type application/x-protobuf.

    One span stands for the whole run, and all others are below it. The ids follow from the run's name and from row,
    time and name of each span, so a collector that gets a run twice gets the same spans. Raises ValueError without
    OpenTelemetry's client.
    """
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ModuleNotFoundError as error:
        raise ValueError("--format=otlp needs OpenTelemetry's client: pip install 'relax-core[otlp]'.") from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    resource = Resource({"service.name": "relax", "relax.run": run})
    scope = InstrumentationScope(SCOPE)
    trace_id, base_us = _id(run, bytes_=16), first_us(spans)

    def made(name: str, span_id: int, start_us: int, end_us: int, **given: Any) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=SpanContext(trace_id, span_id, is_remote=False),
            resource=resource,
            instrumentation_scope=scope,
            start_time=1000 * (base_us + start_us),
            end_time=1000 * (base_us + end_us),
            **given,
        )

    placed = list(placed_spans(spans))
    whole_id = _id(run, "run")
    found = [made(run, whole_id, 0, max(one.end_us for one in placed))]
    for one in placed:
        parent = whole_id if one.parent is None else _span_id(run, one.parent)
        values: dict[str, str | float] = {"lane": one.span.lane, "step": one.span.step, **one.span.values}
        found.append(
            made(
                one.span.name,
                _span_id(run, one),
                one.start_us,
                one.end_us,
                parent=SpanContext(trace_id, parent, is_remote=False),
                attributes={f"relax.{name}": value for name, value in values.items()},
            )
        )
    return encode_spans(found).SerializeToString()


def _span_id(run: str, one: PlacedSpan) -> int:
    return _id(run, one.row, one.start_us, one.end_us, one.span.name, round(1e6 * one.span.start_s))


def _id(*parts: object, bytes_: int = 8) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=bytes_).digest(), "big")


def first_us(spans: Sequence[Span]) -> int:
    """Returns when the first span began, in Unix microseconds."""
    return round(1e6 * min(span.start_s for span in spans))


def placed_spans(spans: Sequence[Span]) -> Iterator[PlacedSpan]:
    """Yields the spans with their rows, in order of their starts.

    The clocks of two records differ by parts of a millisecond, so a step begins where the one before has ended.
    """
    base_s = min(span.start_s for span in spans)
    ends: dict[str, list[int]] = {}
    step: PlacedSpan | None = None
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        start, end = (round(1e6 * (time_s - base_s)) for time_s in (span.start_s, span.end_s))
        if span.lane == PARTS_LANE:
            low, high = (0, 0) if step is None else (step.start_us, step.end_us)
            start, end = (min(max(time, low), high) for time in (start, end))
            yield PlacedSpan(TRAINER_LANE, 0, start, end, span, step)
            continue
        taken = ends.setdefault(span.lane, [])
        if span.lane == TRAINER_LANE:
            start = max(start, taken[0] if taken else start)
            end = max(start, end)
            place = 0
        else:
            place = next((place for place, before in enumerate(taken) if before <= start), len(taken))
        taken[place : place + 1] = [end]
        one = PlacedSpan(span.lane, place, start, end, span)
        step = one if span.lane == TRAINER_LANE else step
        yield one


WRITERS: dict[str, tuple[str, Callable[..., bytes]]] = {  # format → the file's name by default, and its writer
    "chrome": ("trace.json", chrome_trace),
    "otlp": ("trace.otlp.pb", otlp_trace),
}

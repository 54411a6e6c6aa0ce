"""Writes the spans of a run as a trace: in Chrome's JSON format, in Perfetto's protobuf, and as OTLP/JSON.

Each format gets the same rows. Spans of one row are nested or apart: a lane whose spans overlap has several rows, and
the parts of a train step stand in the trainer's row, inside their step.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from relax_core.server.timeline.run_timeline import PARTS_LANE, TRAINER_LANE
from relax_core.server.timeline.timeline_spans import Span

INSTALL = "pip install 'relax-core[perfetto]'"
PROCESS = 1  # the number of the one process that Chrome's and Perfetto's traces have
SEQUENCE = 1  # the number of the one sequence of packets in Perfetto's trace
SPAN_KIND_INTERNAL = 1  # of OTLP: a span of work that is no request to another service
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


def perfetto_trace(spans: Sequence[Span], *, run: str) -> bytes:
    """Returns the trace in Perfetto's protobuf, made by the builder of the package ``perfetto``.

    Times are those since the first span: with the time of day, Perfetto's page hides the rows until they are opened.
    Raises ValueError with the command that installs the package, if it is missing.
    """
    if importlib.util.find_spec("perfetto") is None:
        raise ValueError(f"--format=perfetto needs the package perfetto: {INSTALL}.")
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    _Packets(builder.add_packet, run=run).add(placed_spans(spans))
    return bytes(builder.serialize())


class _Packets:
    """Adds the packets of Perfetto's trace: a process, a thread of it for each row, and begin and end of each span.

    Names that return are written once and then named by a number, which is most of what makes the trace small.
    """

    def __init__(self, add_packet: Callable[[], Any], *, run: str) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages

        self._add_packet, self._messages = add_packet, messages
        self._numbers: dict[tuple[str, str], int] = {}
        packet = self._packet()
        packet.sequence_flags = messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.track_descriptor.uuid = PROCESS
        packet.track_descriptor.process.pid = PROCESS
        packet.track_descriptor.process.process_name = f"Relax: {run}"

    def add(self, placed: Iterator[PlacedSpan]) -> None:
        """Adds the rows, one behind the other, each with its spans in the order of time."""
        rows: dict[str, list[PlacedSpan]] = {}
        for one in placed:
            rows.setdefault(one.row, []).append(one)
        for number, (name, own) in enumerate(rows.items(), start=PROCESS + 1):
            track = self._packet().track_descriptor
            track.uuid, track.thread.pid, track.thread.tid, track.thread.thread_name = number, PROCESS, number, name
            open_ends: list[int] = []
            for one in sorted(own, key=lambda one: (one.start_us, -one.end_us)):
                while open_ends and open_ends[-1] <= one.start_us:
                    self._event("TYPE_SLICE_END", open_ends.pop(), track=number)
                instant = one.end_us == one.start_us
                kind = "TYPE_INSTANT" if instant else "TYPE_SLICE_BEGIN"
                self._event(kind, one.start_us, track=number, span=one.span)
                if not instant:
                    open_ends.append(one.end_us)
            while open_ends:
                self._event("TYPE_SLICE_END", open_ends.pop(), track=number)

    def _packet(self) -> Any:
        packet = self._add_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _event(self, kind: str, time_us: int, *, track: int, span: Span | None = None) -> None:
        packet = self._packet()
        packet.timestamp = 1000 * time_us
        packet.sequence_flags = self._messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type, event.track_uuid = getattr(self._messages.TrackEvent, kind), track
        if span is None:
            return
        event.name_iid = self._number(packet, "event_names", span.name)
        event.category_iids.append(self._number(packet, "event_categories", span.lane))
        step = event.debug_annotations.add(int_value=span.step)
        step.name_iid = self._number(packet, "debug_annotation_names", "step")
        for name, value in span.values.items():
            annotation = event.debug_annotations.add(double_value=value)
            annotation.name_iid = self._number(packet, "debug_annotation_names", name)

    def _number(self, packet: Any, kind: str, name: str) -> int:
        """Returns the number of a name, which the packet declares if it is the first one with this name."""
        known = self._numbers.get((kind, name))
        if known is None:
            known = self._numbers[kind, name] = len(self._numbers) + 1
            getattr(packet.interned_data, kind).add(iid=known, name=name)
        return known


def otlp_trace(spans: Sequence[Span], *, run: str) -> bytes:
    """Returns the trace as OTLP/JSON, the body of ``POST /v1/traces`` with the content type application/json.

    One span stands for the whole run, and all others are below it. The ids follow from the run's name and from row,
    time and name of each span, so a collector that gets a run twice gets the same spans.
    """
    trace_id, base_us = _id(run, bytes_=16), first_us(spans)
    whole = {"traceId": trace_id, "spanId": _id(run, "run"), "name": run, "kind": SPAN_KIND_INTERNAL}
    end_us = 0
    found = []
    for one in placed_spans(spans):
        end_us = max(end_us, one.end_us)
        values: dict[str, str | float] = {"lane": one.span.lane, "step": one.span.step, **one.span.values}
        found.append(
            {
                "traceId": trace_id,
                "spanId": _span_id(run, one),
                "parentSpanId": whole["spanId"] if one.parent is None else _span_id(run, one.parent),
                "name": one.span.name,
                "kind": SPAN_KIND_INTERNAL,
                "startTimeUnixNano": str(1000 * (base_us + one.start_us)),
                "endTimeUnixNano": str(1000 * (base_us + one.end_us)),
                "attributes": _attributes({f"relax.{name}": value for name, value in values.items()}),
            }
        )
    whole |= {"startTimeUnixNano": str(1000 * base_us), "endTimeUnixNano": str(1000 * (base_us + end_us))}
    resource = {"attributes": _attributes({"service.name": "relax", "relax.run": run})}
    scopes = [{"scope": {"name": SCOPE}, "spans": [whole, *found]}]
    return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


def _span_id(run: str, one: PlacedSpan) -> str:
    return _id(run, one.row, one.start_us, one.end_us, one.span.name, round(1e6 * one.span.start_s))


def _id(*parts: object, bytes_: int = 8) -> str:
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=bytes_).hexdigest()


def _attributes(values: Mapping[str, str | float]) -> list[dict[str, Any]]:
    """Returns the attributes in OTLP's form, in which an int is a decimal text."""
    found: list[dict[str, Any]] = []
    for name, value in values.items():
        match value:
            case str():
                found.append({"key": name, "value": {"stringValue": value}})
            case int():
                found.append({"key": name, "value": {"intValue": str(value)}})
            case float():
                found.append({"key": name, "value": {"doubleValue": value}})
    return found


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
    "perfetto": ("trace.pftrace", perfetto_trace),
    "otlp": ("trace.otlp.json", otlp_trace),
}

"""Builds the timeline of a run: work of roles, ranks and engines; restarts, recoveries and orders.

Every record of work has a duration and an end time. The timeline shows the parts of a train step one after the other,
in the trainer's order. A step with several micro-batches really alternates between some parts. So the lengths of the
parts are exact, but their positions inside the step are not. Restarts come from `logs/recoveries.json`, orders from the
event log.

`WRITERS` write the spans as a trace: in Chrome's JSON format, or as OTLP with OpenTelemetry's classes. Both formats
have the same rows. Spans of one row are nested or disjoint. So a lane with overlapping spans gets several rows. The
parts of a train step are in the trainer's row, inside the step.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from relax_core.contracts.untrusted_files import decode_json, read_plain_file
from relax_core.observe.event_log import ACTOR, EVAL, ORDERS, RANK, ROLLOUT, EventReader, OrderChange
from relax_core.observe.summary import STEP_PARTS
from relax_core.server.order_types import ENDED
from relax_core.server.run_events import TimedRecord
from relax_core.server.run_folders import BROKEN, inside, reason

TRAIN = "train/"  # prefix of the parts of the train call
RANK_PARTS = ("pack", "forward", "backward", "pipeline", "sums", "reduce", "optimizer")  # in the usual order
IN_PIPELINE = ("pack", "forward")  # parts that are included in a rank's pipeline schedule time
BETWEEN_CALLS = "between calls"
_ENGINE, _SPAN, _LAG = "engine/", "/span", "/lag"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one piece of work from ``start_s`` to ``end_s`` (Unix seconds). ``values`` has its further metrics.

    ``of_rank`` is True for work of a single trainer rank.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    step: int
    values: dict[str, float] = {}
    of_rank: bool = False


def span_of(lane: str, name: str, record: TimedRecord, took_ms: float) -> Span:
    """Returns the span of a record. It has the record's metrics, except metrics of parts and of single engines."""
    values = {key: value for key, value in record.ms.items() if not key.startswith((TRAIN, _ENGINE))}
    return Span(
        lane=lane, name=name, start_s=record.end_s - took_ms / 1e3, end_s=record.end_s, step=record.step, values=values
    )


def engine_spans(record: TimedRecord) -> Iterator[Span]:
    """Yields one span per engine: from its first to its last request in a rollout record."""
    for key, span_ms in record.ms.items():
        if not key.startswith(_ENGINE) or not key.endswith(_SPAN):
            continue
        engine = key.removeprefix(_ENGINE).removesuffix(_SPAN)
        end_s = record.end_s - record.ms.get(f"{_ENGINE}{engine}{_LAG}", 0.0) / 1e3
        counts = {name: record.ms.get(f"{_ENGINE}{engine}/{name}", 0.0) for name in ("requests", "samples")}
        yield Span(
            lane=engine,
            name=f"requests of batch {record.step}",
            start_s=end_s - span_ms / 1e3,
            end_s=end_s,
            step=record.step,
            values=counts,
        )


def rank_spans(record: TimedRecord) -> Iterator[Span]:
    """Yields the parts of each rank's work on a train step, one after the other. The sum is the rank's step time."""
    for key, step_ms in record.ms.items():
        name = key.removesuffix("/step")
        if name == key:
            continue
        end_s = record.end_s - record.ms.get(f"{name}{_LAG}", 0.0) / 1e3
        at_s = end_s - step_ms / 1e3
        for part, ms in _parts(record.ms, name, step_ms):
            until_s = min(at_s + ms / 1e3, end_s)
            cpu = record.ms.get(f"{name}/cpu/{part}")
            values = {} if cpu is None else {"cpu_ms": cpu}
            yield Span(lane=name, name=part, start_s=at_s, end_s=until_s, step=record.step, values=values, of_rank=True)
            at_s = until_s


def _parts(ms: dict[str, float], name: str, step_ms: float) -> Iterator[tuple[str, float]]:
    rest = step_ms
    inside = sum(ms.get(f"{name}/{part}", 0.0) for part in IN_PIPELINE)
    for part in RANK_PARTS:
        took = ms.get(f"{name}/{part}", 0.0)
        if part == "pipeline" and took:
            took = max(0.0, took - inside)
        if took > 0.0:
            rest -= took
            yield part, took
    if rest > 0.0:
        yield BETWEEN_CALLS, rest


RESTARTS_LANE, RECOVERIES_LANE, ORDERS_LANE = "restarts", "recoveries", "orders"
FILE = ("logs", "recoveries.json")
IN_PLACE = 1  # tier of a recovery that restarted one process
MAX_ORDERS = 1000  # limit of orders; the newest are kept
MAX_STATES = 100  # limit of states of an order
MAX_FILE = 4 * 2**20  # limit of a JSON file in bytes
MAX_NAMED = 4  # limit of engines in the name of an order's span


class _Recovery(msgspec.Struct):
    tier: int
    cause: str
    at_step: int
    from_step: int
    time_s: float | None = None
    seconds: float | None = None


class _StateAt(msgspec.Struct):
    state: str
    at: float


class RunOrder(msgspec.Struct):
    """Holds the fields of an order that the timeline shows."""

    request_id: str
    kind: str
    engine_ids: list[str]
    failure: str
    history: Annotated[list[_StateAt], msgspec.Meta(min_length=1, max_length=MAX_STATES)]


class _Line(msgspec.Struct):
    order: RunOrder | None = None


_recoveries_decoder = msgspec.json.Decoder(list[_Recovery])
_line_decoder = msgspec.json.Decoder(_Line)


def event_spans(
    run_dir: Path, timed: Sequence[TimedRecord], orders: Iterable[RunOrder]
) -> tuple[list[Span], list[str]]:
    """Returns the spans of restarts, recoveries and orders of a run, and sentences about unreadable files.

    A span without an end lasts until the newest record of ``timed``.
    """
    spans: list[Span] = []
    problems: list[str] = []
    ends = [(record.end_s, record.step) for record in timed if record.source == ACTOR]
    newest_s = max((record.end_s for record in timed), default=0.0)
    try:
        spans += _recovery_spans(_recoveries(run_dir), ends, newest_s)
    except BROKEN as error:
        message = reason("", error)
        problems.append(f"{'/'.join(FILE)} cannot be read, so no restart and no recovery is shown: {message}.")
    for order in orders:
        spans += _order_spans(order, ends, newest_s)
    return spans, problems


def _recoveries(run_dir: Path) -> list[_Recovery]:
    try:
        path = inside(run_dir, *FILE)
    except FileNotFoundError:  # no process was lost
        return []
    return decode_json(read_plain_file(path, max_bytes=MAX_FILE), _recoveries_decoder)


def _recovery_spans(
    recoveries: Sequence[_Recovery], ends: Sequence[tuple[float, int]], newest_s: float
) -> Iterator[Span]:
    for recovery in recoveries:
        if recovery.time_s is None:  # older versions wrote no times
            continue
        if recovery.seconds is not None:
            end_s = recovery.time_s + recovery.seconds
        else:  # the controller of this recovery ended before a train step
            place = bisect_right(ends, recovery.time_s, key=itemgetter(0))
            end_s = ends[place][0] if place < len(ends) else max(recovery.time_s, newest_s)
        in_place = recovery.tier == IN_PLACE
        yield Span(
            lane=RESTARTS_LANE if in_place else RECOVERIES_LANE,
            name=recovery.cause
            if in_place
            else f"{recovery.cause}; all services start again from step {recovery.from_step}",
            start_s=recovery.time_s,
            end_s=end_s,
            step=recovery.at_step,
        )


def take_order(orders: dict[str, RunOrder], change: OrderChange) -> None:
    """Adds a change to the newest orders, oldest first. Raises ValueError for a malformed change."""
    order = decode_json(bytes(change.change), _line_decoder).order
    if order is not None:
        orders[order.request_id] = order
        if len(orders) > MAX_ORDERS:
            del orders[next(iter(orders))]


def read_orders(run_dir: Path) -> list[RunOrder]:
    """Returns the newest orders of a run. Ignores unreadable changes."""
    found: dict[str, RunOrder] = {}
    for event in EventReader(run_dir, kinds=("order",), writer=ORDERS).each():
        with suppress(ValueError):
            if isinstance(event, OrderChange):
                take_order(found, event)
    return list(found.values())


def _order_spans(order: RunOrder, ends: Sequence[tuple[float, int]], newest_s: float) -> Iterator[Span]:
    """Yields a span for each state of an order. The span of the final state has no length."""
    named = ", ".join(order.engine_ids[:MAX_NAMED])
    more = len(order.engine_ids) - MAX_NAMED
    what = f"{order.kind} {named}{f' and {more} more' if more > 0 else ''}".strip()
    until = [change.at for change in order.history[1:]]
    for change, end_s in zip(order.history, [*until, None], strict=True):
        last_s = change.at if change.state in ENDED else max(change.at, newest_s)
        failure = f": {order.failure}" if order.failure and end_s is None else ""
        yield Span(
            lane=ORDERS_LANE,
            name=f"{what}: {change.state}{failure}",
            start_s=change.at,
            end_s=last_s if end_s is None else end_s,
            step=_step_at(ends, change.at),
        )


def _step_at(ends: Sequence[tuple[float, int]], time_s: float) -> int:
    """Returns the train step that was under way at a time."""
    place = bisect_right(ends, time_s, key=itemgetter(0))
    if place < len(ends):
        return ends[place][1]
    return ends[-1][1] + 1 if ends else 0


ORDER = ("checkpoint", *(part for part in STEP_PARTS if part != "checkpoint"))
OTHER = "other"
TRAINER_LANE, PARTS_LANE = "trainer", "trainer's parts"
MAX_STEPS = 400
MAX_RANK_SPANS = 20_000  # a timeline with more spans leaves out the parts of ranks
NEAR_S = 60.0  # longest delay of a record after the end of its step, and longest weight push
# Share of a step that the trainer waits: at MUCH or more, rollout is the slower side; at LITTLE or less, the trainer.
MUCH, LITTLE = 0.5, 0.1


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the spans of the train steps ``first`` to ``last``, and the split of the trainer's time.

    ``shares`` maps each part of a step to its share of the time. ``told`` has sentences about the trainer's waits.
    """

    first: int
    last: int
    start_s: float
    end_s: float
    spans: list[Span]
    shares: dict[str, float]
    told: list[str]


def make_timeline(
    timed: Sequence[TimedRecord],
    *,
    first: int | None,
    last: int | None,
    newest: int = 8,
    events: Sequence[Span] = (),
) -> Timeline | None:
    """Returns the timeline of the train steps ``first`` to ``last``, at most `MAX_STEPS`, or of the ``newest`` steps.

    Returns None without steps. If a step was repeated after a resume, its newest record is used. The result has all
    spans of any attempt in the time of the steps, and the spans ``events`` (`event_spans`).
    """
    steps: dict[int, TimedRecord] = {
        record.step: record for record in timed if record.source == ACTOR and "step" in record.ms
    }
    if not steps:
        return None
    last = max(steps) if last is None else last
    first = max(0, last - newest + 1) if first is None else first
    first = max(first, last - MAX_STEPS + 1)
    chosen = [steps[step] for step in sorted(steps) if first <= step <= last]
    if not chosen:
        return None
    start_s = min(record.end_s - record.ms["step"] / 1e3 for record in chosen)
    end_s = max(record.end_s for record in chosen)
    near = [
        record
        for record in timed
        if start_s - NEAR_S < record.end_s and (record.source != RANK or record.end_s < end_s + NEAR_S)
    ]
    spans = [span for span in all_spans(near) if span.end_s > start_s and span.start_s < end_s]
    spans += [span for span in events if span.end_s > start_s and span.start_s < end_s]
    if sum(span.of_rank for span in spans) > MAX_RANK_SPANS:
        spans = [span for span in spans if not span.of_rank]
    shares = step_shares(chosen)
    return Timeline(
        first=chosen[0].step,
        last=chosen[-1].step,
        start_s=start_s,
        end_s=end_s,
        spans=spans,
        shares=shares,
        told=_told(chosen, shares),
    )


def all_spans(timed: Sequence[TimedRecord]) -> list[Span]:
    """Returns all spans of the records, in the order of the records."""
    spans: list[Span] = []
    actors = [record for record in timed if record.source == ACTOR and "step" in record.ms]
    for record in timed:
        if record.source == ACTOR and "step" in record.ms:
            spans += _step_spans(record)
        elif record.source == ROLLOUT and "generate" in record.ms:
            worker = int(record.ms.get("worker", 0))
            spans.append(
                span_of(f"rollout {worker}", f"batch for weights {record.step}", record, record.ms["generate"])
            )
            spans += engine_spans(record)
        elif record.source == RANK:
            spans += rank_spans(record)
        elif record.source == EVAL:
            spans.append(span_of("evaluation", f"evaluation of weights {record.step} is complete", record, 0.0))
    for before, after in pairwise(actors):
        if push := after.ms.get("push"):
            spans.append(
                Span(
                    lane="weights",
                    name=f"weights {before.step + 1} to the engines",
                    start_s=before.end_s,
                    end_s=before.end_s + push / 1e3,
                    step=before.step,
                )
            )
    return spans


def step_shares(steps: Sequence[TimedRecord]) -> dict[str, float]:
    """Returns the share of each part in the time of the steps. The sum is 1."""
    total = sum(step.ms["step"] for step in steps)
    shares = {part: sum(step.ms.get(part, 0.0) for step in steps) / total for part in ORDER} if total else {}
    return {**shares, OTHER: 1.0 - sum(shares.values())} if shares else {}


class _Part(NamedTuple):
    name: str
    ms: float


def _step_spans(record: TimedRecord) -> list[Span]:
    parts = [_Part(name, record.ms.get(name, 0.0)) for name in ORDER]
    rest = record.ms["step"] - sum(part.ms for part in parts)
    at_s = record.end_s - record.ms["step"] / 1e3
    spans = [span_of(TRAINER_LANE, f"step {record.step}", record, record.ms["step"])]
    for part in [*parts, _Part(OTHER, rest)]:
        if part.ms > 0:
            inner = {name: value for name, value in record.ms.items() if name.startswith(TRAIN)}
            values = inner if part.name == "train" else {}
            end_s = min(at_s + part.ms / 1e3, record.end_s)
            spans.append(
                Span(lane=PARTS_LANE, name=part.name, start_s=at_s, end_s=end_s, step=record.step, values=values)
            )
            at_s = end_s
    return spans


def _told(steps: Sequence[TimedRecord], shares: dict[str, float]) -> list[str]:
    if not shares:
        return []
    messages = []
    wait = shares["wait"]
    if wait >= MUCH:
        messages.append(
            f"The trainer waits for samples {wait:.0%} of its time: generation, env or rewards are the slower side."
        )
    elif wait <= LITTLE:
        messages.append(f"The trainer waits for samples {wait:.0%} of its time: it is the slower side.")
    else:
        messages.append(f"The trainer waits for samples {wait:.0%} of its time and trains {shares['train']:.0%} of it.")
    inner: Counter[str] = Counter()
    for step in steps:
        inner.update({name: value for name, value in step.ms.items() if name.startswith(TRAIN)})
    if inner and wait < MUCH:
        ((name, most),) = inner.most_common(1)
        share = most / sum(step.ms["step"] for step in steps)
        messages.append(
            f"Its longest part inside the train call is {name.removeprefix(TRAIN)}, {share:.0%} of the time."
        )
    for part, words in (
        ("sync", "publishes weights"),
        ("checkpoint", "saves checkpoints"),
        ("bus", "waits for the bus"),
    ):
        if shares[part] > LITTLE:
            messages.append(f"It {words} {shares[part]:.0%} of its time.")
    return messages


# -- Traces ------------------------------------------------------------------------------------------------------------
PROCESS = 1  # id of the single process in a Chrome trace
SCOPE = "relax trace"


class PlacedSpan(NamedTuple):
    """Holds a span and its row, named by ``lane`` and ``place``. Times are whole microseconds since the first span.

    ``parent`` is the train step that contains the span, or None if the span is not a part of a train step.
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
    """Returns the trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing."""
    return msgspec.json.encode({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"})


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the events in Chrome's trace format. Times are whole microseconds since the first span."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for placed_span in placed_spans(spans):
        row = rows.setdefault(placed_span.row, len(rows) + 1)
        event = {
            "name": placed_span.span.name,
            "cat": placed_span.span.lane,
            "pid": PROCESS,
            "tid": row,
            "ts": placed_span.start_us,
        }
        shape = (
            {"ph": "X", "dur": placed_span.end_us - placed_span.start_us}
            if placed_span.end_us > placed_span.start_us
            else {"ph": "i", "s": "t"}
        )
        events.append({**event, **shape, "args": {"step": placed_span.span.step, **placed_span.span.values}})
    names = [
        {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    return [{"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "Relax"}}, *names, *events]


def otlp_trace(spans: Sequence[Span], *, run: str) -> bytes:
    """Returns the trace as OTLP, the body of ``POST /v1/traces`` with the content type application/x-protobuf.

    One root span covers the whole run. Ids are derived from the run's name and the row, time and name of each span. So
    a collector that receives a run twice gets equal spans. Raises ValueError if OpenTelemetry's client is missing.
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
    found = [made(run, whole_id, 0, max(placed_span.end_us for placed_span in placed))]
    for placed_span in placed:
        parent = whole_id if placed_span.parent is None else _span_id(run, placed_span.parent)
        values: dict[str, str | float] = {
            "lane": placed_span.span.lane,
            "step": placed_span.span.step,
            **placed_span.span.values,
        }
        found.append(
            made(
                placed_span.span.name,
                _span_id(run, placed_span),
                placed_span.start_us,
                placed_span.end_us,
                parent=SpanContext(trace_id, parent, is_remote=False),
                attributes={f"relax.{name}": value for name, value in values.items()},
            )
        )
    return encode_spans(found).SerializeToString()


def _span_id(run: str, placed_span: PlacedSpan) -> int:
    return _id(
        run,
        placed_span.row,
        placed_span.start_us,
        placed_span.end_us,
        placed_span.span.name,
        round(1e6 * placed_span.span.start_s),
    )


def _id(*parts: object, bytes_: int = 8) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=bytes_).digest(), "big")


def first_us(spans: Sequence[Span]) -> int:
    """Returns the start time of the first span in Unix microseconds."""
    return round(1e6 * min(span.start_s for span in spans))


def placed_spans(spans: Sequence[Span]) -> Iterator[PlacedSpan]:
    """Yields the spans with their rows, in order of their starts.

    The clocks of two records differ by fractions of a millisecond. So a step's start is moved to the previous step's
    end if they overlap.
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
        placed_span = PlacedSpan(span.lane, place, start, end, span)
        step = placed_span if span.lane == TRAINER_LANE else step
        yield placed_span


WRITERS: dict[str, tuple[str, Callable[..., bytes]]] = {  # format → default file name, and writer
    "chrome": ("trace.json", chrome_trace),
    "otlp": ("trace.otlp.pb", otlp_trace),
}

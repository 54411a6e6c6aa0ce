"""Makes the spans of the trainer's ranks and of the engines from a run's records."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from relax_core.server.run_series import TimedRecord

TRAIN = "train/"  # the names of the parts of the train call begin so
RANK_PARTS = ("pack", "forward", "sums", "backward", "pipeline", "reduce", "optimizer")  # in their usual order
IN_PIPELINE = ("pack", "forward", "sums")  # parts that a rank's time in the pipeline's schedule has inside
BETWEEN_CALLS = "between calls"
_ENGINE, _SPAN, _LAG = "engine/", "/span", "/lag"


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Is one piece of work from ``start_s`` to ``end_s``, in Unix seconds; ``values`` has further numbers of it.

    ``of_rank`` is True for a part of the work of one of the trainer's ranks.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    step: int
    values: dict[str, float] = {}
    of_rank: bool = False


def span_of(lane: str, name: str, one: TimedRecord, took_ms: float) -> Span:
    """Returns the span of a record that ended with it, and its numbers but for those of parts and single engines."""
    values = {key: value for key, value in one.ms.items() if not key.startswith((TRAIN, _ENGINE))}
    return Span(lane=lane, name=name, start_s=one.end_s - took_ms / 1e3, end_s=one.end_s, step=one.step, values=values)


def engine_spans(one: TimedRecord) -> Iterator[Span]:
    """Yields a span for each engine: from the first to the last of its requests that the record of a rollout tells."""
    for key, span_ms in one.ms.items():
        if not key.startswith(_ENGINE) or not key.endswith(_SPAN):
            continue
        engine = key.removeprefix(_ENGINE).removesuffix(_SPAN)
        end_s = one.end_s - one.ms.get(f"{_ENGINE}{engine}{_LAG}", 0.0) / 1e3
        counts = {name: one.ms.get(f"{_ENGINE}{engine}/{name}", 0.0) for name in ("requests", "samples")}
        yield Span(
            lane=engine,
            name=f"requests of batch {one.step}",
            start_s=end_s - span_ms / 1e3,
            end_s=end_s,
            step=one.step,
            values=counts,
        )


def rank_spans(one: TimedRecord) -> Iterator[Span]:
    """Yields the parts of each rank's work on a train step, one behind the other; together they are its time."""
    for key, step_ms in one.ms.items():
        name = key.removesuffix("/step")
        if name == key:
            continue
        end_s = one.end_s - one.ms.get(f"{name}{_LAG}", 0.0) / 1e3
        at_s = end_s - step_ms / 1e3
        for part, ms in _parts(one.ms, name, step_ms):
            until_s = min(at_s + ms / 1e3, end_s)
            cpu = one.ms.get(f"{name}/cpu/{part}")
            values = {} if cpu is None else {"cpu_ms": cpu}
            yield Span(lane=name, name=part, start_s=at_s, end_s=until_s, step=one.step, values=values, of_rank=True)
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

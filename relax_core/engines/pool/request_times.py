"""Records when each engine of a pool had requests under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class _Span:
    began_s: float
    ended_s: float
    requests: int = 0
    samples: int = 0


class RequestTimes:
    """Adds up the requests to each engine that have ended; it belongs to one event loop."""

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}

    @contextmanager
    def of(self, engine: str, *, samples: int) -> Iterator[None]:
        """Counts the block as a request to an engine for so many samples, however it ends."""
        began_s = time.time()
        try:
            yield
        finally:
            ended_s = time.time()
            span = self._spans.setdefault(engine, _Span(began_s, ended_s))
            span.began_s, span.ended_s = min(span.began_s, began_s), max(span.ended_s, ended_s)
            span.requests += 1
            span.samples += samples

    def take(self) -> dict[str, float]:
        """Returns the numbers of each engine whose requests have ended since the last call, as engine/NAME/NUMBER.

        ``span_ms`` is the time from the begin of the first of these requests to the end of the last one, and ``lag_ms``
        the time from there until now. ``requests`` and ``samples`` count what was asked for.
        """
        spans, self._spans = self._spans, {}
        now_s = time.time()
        values: dict[str, float] = {}
        for engine, span in spans.items():
            values[f"engine/{engine}/span_ms"] = round(1e3 * (span.ended_s - span.began_s), 3)
            values[f"engine/{engine}/lag_ms"] = round(1e3 * (now_s - span.ended_s), 3)
            values[f"engine/{engine}/requests"] = float(span.requests)
            values[f"engine/{engine}/samples"] = float(span.samples)
        return values

"""Tracks which engines of a pool may get prompts, measures request times, and calls several engines at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from relax_core.contracts.engine import EngineError, EngineUnreachable

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loss:
    """Describes the loss of an engine that does not answer: the monotonic time of the loss, and the newest error."""

    since: float
    error: EngineError


class EngineStates:
    """Tracks which engines of a pool may get prompts. Starts with engines 0 to ``count`` - 1.

    An engine that is down gets no prompts. An engine is a straggler if it has been more than ``max_lag`` weight
    versions behind another engine for more than ``lag_s`` seconds. A straggler gets no prompts while another engine may
    get them. The class sends no requests: the pool records its observations here.
    """

    def __init__(self, count: int, *, max_lag: int, lag_s: float) -> None:
        self.all = list(range(count))  # in order
        self.down: dict[int, Loss] = {}
        self._leaving: frozenset[int] = frozenset()  # engines that get no new prompts
        self._max_lag, self._lag_s = max_lag, lag_s
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._versions: dict[int, int] = {}
        self._lagging_since: dict[int, float] = {}

    def change(self, engines: Collection[int], *, leaving: Collection[int]) -> None:
        """Sets the pool's engines and forgets all others. Engines in ``leaving`` get no new prompts."""
        assert set(engines) > set(leaving), "at least one engine gets prompts"
        self.all, self._leaving = sorted(engines), frozenset(leaving)
        known: dict[int, Any]
        for known in (self.down, self._versions, self._lagging_since):
            for engine in known.keys() - set(engines):
                del known[engine]
        self._note_usable()

    def takes_prompts(self, engine: int) -> bool:
        """Returns whether the engine belongs to the pool and is not leaving. The engine may be down."""
        return engine in self.all and engine not in self._leaving

    def up(self) -> list[int]:
        """Returns the engines that are not down."""
        return [engine for engine in self.all if engine not in self.down]

    def usable(self) -> list[int]:
        """Returns the engines that may get prompts now; the list is empty while all are down."""
        up, stragglers = [engine for engine in self.up() if engine not in self._leaving], self.stragglers()
        return [engine for engine in up if engine not in stragglers] or up

    def lost(self, engine: int, error: EngineError) -> None:
        """Records that the engine does not answer."""
        if engine in self.all and engine not in self.down:
            self.down[engine] = Loss(time.monotonic(), error)
            self._versions.pop(engine, None)
            self._lagging_since.pop(engine, None)
            self._note_usable()

    def answers(self, engine: int, loss: Loss) -> None:
        """Records that the engine answers again after ``loss``; ignored if the engine has had another loss since."""
        if self.down.get(engine) is loss:
            del self.down[engine]
            self._note_usable()

    def _note_usable(self) -> None:
        if self.usable():
            self._some_up.set()
        else:
            self._some_up.clear()

    async def wait_usable(self, *, timeout_s: float) -> None:
        """Waits until an engine may get prompts.

        Raises EngineUnreachable with the last error of every engine, if no engine answers for ``timeout_s`` seconds
        after the last engine was lost.
        """
        while not self._some_up.is_set():
            left = max(loss.since for loss in self.down.values()) + timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._some_up.wait()
            except TimeoutError:
                message = "; ".join(f"engine {engine}: {loss.error}" for engine, loss in sorted(self.down.items()))
                raise EngineUnreachable(
                    f"no engine has answered anything for {timeout_s:g} s; last: {message}"
                ) from None

    def serves(self, engine: int, version: int) -> None:
        """Records that the engine serves weights ``version``."""
        if engine not in self.all or version <= self._versions.get(engine, -1):
            return
        self._versions[engine] = version
        newest, now = max(self._versions.values()), time.monotonic()
        for other_engine, served in self._versions.items():
            if newest - served <= self._max_lag:
                self._lagging_since.pop(other_engine, None)
            else:
                self._lagging_since.setdefault(other_engine, now)

    def stragglers(self) -> list[int]:
        """Returns the stragglers."""
        limit = time.monotonic() - self._lag_s
        return [engine for engine, since in self._lagging_since.items() if since < limit]

    def lag_message(self, engine: int) -> str:
        """Returns the log message about a straggler."""
        return (
            f"engine {engine} serves weights {self._versions[engine]} and has been more than {self._max_lag} versions "
            f"behind another engine (weights {max(self._versions.values())}) for {self._lag_s:g} s. It gets no prompts "
            "until it has newer weights"
        )


@dataclass(slots=True)
class _Span:
    began_s: float
    ended_s: float
    requests: int = 0
    samples: int = 0


class RequestTimes:
    """Accumulates the times of ended requests by engine. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}

    @contextmanager
    def of(self, engine: str, *, samples: int) -> Iterator[None]:
        """Counts the ``with`` block as one request to an engine for ``samples`` samples, even if it fails."""
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
        """Returns metrics of the requests that ended since the last call, as engine/NAME/METRIC.

        ``span_ms`` is the time from the start of an engine's first request to the end of its last request. ``lag_ms``
        is the time from this end until now. ``requests`` and ``samples`` are the numbers of requests and of requested
        samples.
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


# -- one call to several engines at the same time ----------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class FanOut(Generic[T]):
    """Holds the outcome of a call: ``answers`` maps engines to results, ``failures`` maps failed engines to errors."""

    answers: dict[str, T]
    failures: dict[str, EngineError]

    def describe(self) -> str:
        """Returns which engines failed, e.g. "1 of 2 engines failed: engine-1: no answer within 60 s", or ""."""
        if not self.failures:
            return ""
        count = len(self.failures) + len(self.answers)
        return f"{len(self.failures)} of {count} engines failed: " + "; ".join(
            f"{name}: {why}" for name, why in self.failures.items()
        )


def fan_out(calls: Mapping[str, Callable[[], T]]) -> FanOut[T]:
    """Makes all calls in parallel threads, and waits for all of them.

    The deadlines of the clients limit the wait. An EngineError is returned in ``failures``; other exceptions are
    raised.
    """
    if not calls:
        return FanOut(answers={}, failures={})
    with ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="fan-out") as threads:
        outcomes = dict(zip(calls, threads.map(_outcome, calls.values()), strict=True))
    return FanOut(
        answers={name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, EngineError)},
        failures={name: outcome for name, outcome in outcomes.items() if isinstance(outcome, EngineError)},
    )


def log_failures(call: asyncio.Future[FanOut[T]]) -> None:
    """Logs which engines failed to abort requests."""
    if not call.cancelled() and call.exception() is None and (message := call.result().describe()):
        log.warning("abort: %s", message)


def _outcome(call: Callable[[], T]) -> T | EngineError:
    try:
        return call()
    except EngineError as error:
        return error

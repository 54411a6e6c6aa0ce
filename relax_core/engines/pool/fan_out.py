"""Makes one control call to several engines at the same time and collects each engine's answer or failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from relax_core.contracts.engine import EngineError

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FanOut(Generic[T]):
    """Holds a call's outcome: ``answers`` maps engines to answers, ``failures`` maps the others to errors."""

    answers: dict[str, T]
    failures: dict[str, EngineError]

    def words(self) -> str:
        """Returns which engines failed, e.g. "1 of 2 engines failed: engine-1: no answer within 60 s", or ""."""
        if not self.failures:
            return ""
        count = len(self.failures) + len(self.answers)
        return f"{len(self.failures)} of {count} engines failed: " + "; ".join(
            f"{name}: {why}" for name, why in self.failures.items()
        )


def fan_out(calls: Mapping[str, Callable[[], T]]) -> FanOut[T]:
    """Makes all calls, each in a thread of its own, and waits for all of them.

    The clients' own deadlines bound the wait. An EngineError is returned as that engine's failure; any other exception
    is raised.
    """
    if not calls:
        return FanOut(answers={}, failures={})
    with ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="fan-out") as threads:
        outcomes = dict(zip(calls, threads.map(_outcome, calls.values()), strict=True))
    return FanOut(
        answers={name: one for name, one in outcomes.items() if not isinstance(one, EngineError)},
        failures={name: one for name, one in outcomes.items() if isinstance(one, EngineError)},
    )


def log_failures(call: asyncio.Future[FanOut[T]]) -> None:
    """Logs which engines failed in an abort that has ended."""
    if not call.cancelled() and call.exception() is None and (words := call.result().words()):
        log.warning("abort: %s", words)


def _outcome(call: Callable[[], T]) -> T | EngineError:
    try:
        return call()
    except EngineError as error:
        return error

"""Tracks which engines of a pool may get prompts: which are down, which have old weights, and each engine's load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.protocol.engine_client import EngineClient

ClientFor = Callable[[int, bool], Awaitable[EngineClient]]

PROBE_S = 0.1  # seconds between two probes of an engine that is down; its owner restarts it
LOAD_POLL_S = 1.0  # least seconds between two polls of the engines' load
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Loss:
    since: float
    error: EngineError


class EngineWatch:
    """Watches the engines of one pool, at first engines 0 to ``count`` - 1.

    ``client_for``, ``timeout_s`` and ``silent_s`` are those of `EnginePool`. ``max_lag`` is how many weight versions
    an engine may be behind another; an engine that is further behind for more than ``lag_s`` seconds is a straggler.
    """

    def __init__(
        self, count: int, client_for: ClientFor, *, timeout_s: float, silent_s: float, max_lag: int, lag_s: float
    ) -> None:
        self.engines = list(range(count))  # those that are watched, in order
        self._leaving: frozenset[int] = frozenset()  # those of them that get no new prompts
        self._client_for = client_for
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._max_lag = max_lag
        self._lag_s = lag_s
        self._down: dict[int, _Loss] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._versions: dict[int, int] = {}
        self._behind_since: dict[int, float] = {}
        self._polled = time.monotonic()
        self._polling: set[int] = set()  # engines whose load is being polled
        self._pinging: set[int] = set()  # engines whose answer to a ping is awaited

    def change_engines(self, engines: Collection[int], *, leaving: Collection[int]) -> None:
        """Watches ``engines`` from now on, of which those in ``leaving`` get no new prompts; forgets all others."""
        assert set(engines) > set(leaving), "at least one engine gets prompts"
        self.engines, self._leaving = sorted(engines), frozenset(leaving)
        known: dict[int, Any]
        for known in (self._down, self._versions, self._behind_since):
            for engine in known.keys() - set(engines):
                del known[engine]
        self._note_usable()

    def takes_prompts(self, engine: int) -> bool:
        """Is True if the engine may get new prompts whenever it answers."""
        return engine in self.engines and engine not in self._leaving

    def _note_usable(self) -> None:
        if self.usable():
            self._some_up.set()
        else:
            self._some_up.clear()

    # -- engines that are down ----------------------------------------------------------------------------------------
    def usable(self) -> list[int]:
        """Returns the engines that may get prompts now; none while all are down."""
        up, stragglers = [engine for engine in self._up() if engine not in self._leaving], self.stragglers()
        return [engine for engine in up if engine not in stragglers] or up

    def _up(self) -> list[int]:
        return [engine for engine in self.engines if engine not in self._down]

    def lost(self, engine: int, error: EngineError) -> None:
        """Records that the engine does not answer; it gets no prompts until a probe finds that it does."""
        if engine in self._down or engine not in self.engines:
            return
        self._down[engine] = _Loss(time.monotonic(), error)
        self._versions.pop(engine, None)
        self._behind_since.pop(engine, None)
        self._note_usable()
        self._start(self._probe(engine))

    async def _probe(self, engine: int) -> None:
        loss = self._down[engine]
        while True:
            await asyncio.sleep(PROBE_S)
            if self._down.get(engine) is not loss:  # the engine has left
                return
            try:
                client = await self._client_for(engine, True)
            except EngineError as error:
                loss.error = error
                continue
            try:
                await client.answers(timeout_s=self._silent_s)
                break
            except EngineError as error:
                loss.error = error
                await client.aclose()  # the next probe gets a new client
        if self._down.get(engine) is loss:
            del self._down[engine]
            self._note_usable()

    def ping(self, silent: Callable[[int, EngineUnreachable], None]) -> None:
        """Starts to ask each of several engines whether it still answers, without waiting.

        ``silent`` gets each engine that does not answer within ``silent_s`` seconds, and the reason.
        """
        if len(self.engines) > 1:
            for engine in self._up():
                if engine not in self._pinging:
                    self._pinging.add(engine)
                    self._start(self._ping_one(engine, silent))

    async def _ping_one(self, engine: int, silent: Callable[[int, EngineUnreachable], None]) -> None:
        try:
            client = await self._client_for(engine, False)
            try:
                await client.answers(timeout_s=self._silent_s / 2)
            except EngineUnreachable:  # perhaps this process itself was stopped, and the answer has arrived since
                await client.answers(timeout_s=self._silent_s / 2)
        except EngineUnreachable as error:
            silent(engine, error)
        finally:
            self._pinging.discard(engine)

    async def wait_usable(self) -> None:
        """Returns once an engine may get prompts.

        Raises EngineUnreachable with every engine's last error if none has answered for ``timeout_s`` seconds since
        the last of them was lost.
        """
        while not self._some_up.is_set():
            left = max(loss.since for loss in self._down.values()) + self._timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._some_up.wait()
            except TimeoutError:
                words = "; ".join(f"engine {engine}: {loss.error}" for engine, loss in sorted(self._down.items()))
                raise EngineUnreachable(
                    f"no engine has answered anything for {self._timeout_s:g} s; last: {words}"
                ) from None

    # -- engines with old weights -------------------------------------------------------------------------------------
    def serves(self, engine: int, version: int) -> None:
        """Records that the engine serves weights ``version``."""
        if engine in self.engines and version > self._versions.get(engine, -1):
            self._versions[engine] = version
            self._record_lags()

    def _record_lags(self) -> None:
        newest, now = max(self._versions.values()), time.monotonic()
        for engine, version in self._versions.items():
            if newest - version <= self._max_lag:
                self._behind_since.pop(engine, None)
            else:
                self._behind_since.setdefault(engine, now)

    def stragglers(self) -> list[int]:
        """Returns the engines that have been more than ``max_lag`` versions behind for more than ``lag_s`` seconds."""
        limit = time.monotonic() - self._lag_s
        return [engine for engine, since in self._behind_since.items() if since < limit]

    def lag_words(self, engine: int) -> str:
        """Returns the log line about a straggler."""
        return (
            f"engine {engine} serves weights {self._versions[engine]}, another engine {max(self._versions.values())}. "
            f"It has been more than {self._max_lag} versions behind for {self._lag_s:g} s and gets no prompts until it "
            "has newer weights"
        )

    # -- the engines' load --------------------------------------------------------------------------------------------
    def poll_loads(self, heard: Callable[[int, int], None]) -> None:
        """Starts to ask several engines for their load and weight version, at most once in ``LOAD_POLL_S`` seconds.

        ``heard`` gets (engine, samples that run or wait there). An engine that has not answered the last poll is not
        asked again, because each poll holds a thread that other calls need.
        """
        now = time.monotonic()
        if len(self.engines) > 1 and now - self._polled >= LOAD_POLL_S:
            self._polled = now
            for engine in self._up():
                if engine not in self._polling:
                    self._polling.add(engine)
                    self._start(self._poll_load(engine, heard))

    async def _poll_load(self, engine: int, heard: Callable[[int, int], None]) -> None:
        try:
            client = await self._client_for(engine, False)
            loads = await asyncio.to_thread(client.loads)
            version = str((await asyncio.to_thread(client.model_info))["weight_version"])
        except EngineError as error:  # a request that generates there finds and reports the failure
            log.debug("%s", error)
            return
        finally:
            self._polling.discard(engine)
        if version.isdecimal():
            self.serves(engine, int(version))
        heard(engine, int(loads["num_running_reqs"]) + int(loads["num_waiting_reqs"]))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# -- one call to several engines at the same time ----------------------------------------------------------------------
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

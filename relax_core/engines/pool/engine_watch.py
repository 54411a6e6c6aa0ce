"""Which of a pool's engines may be asked: who is down, who lags behind with its weights, what each has to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.protocol.engine_client import EngineClient

ClientFor = Callable[[int, bool], Awaitable[EngineClient]]

PROBE_S = 0.1  # between two looks at an engine that is down; its owner restarts it
LOOK_S = 1.0  # at least this long between two looks at what the engines have to do
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loss:
    since: float
    error: EngineError


class EngineWatch:
    """``client_for``, ``patience_s``, ``silent_s``: see `EnginePool`. ``max_lag``: how many weight versions an engine
    may be behind another; one that is further behind for more than ``lag_s`` seconds is a straggler."""

    def __init__(
        self, count: int, client_for: ClientFor, *, patience_s: float, silent_s: float, max_lag: int, lag_s: float
    ) -> None:
        self._count = count
        self._client_for = client_for
        self._patience_s = patience_s
        self._silent_s = silent_s
        self._max_lag = max_lag
        self._lag_s = lag_s
        self._down: dict[int, _Loss] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._versions: dict[int, int] = {}
        self._behind_since: dict[int, float] = {}
        self._looked = time.monotonic()
        self._looking: set[int] = set()  # engines whose look is under way
        self._listening: set[int] = set()  # engines that are asked for a sign of life

    # -- who is down --------------------------------------------------------------------------------------------------
    def usable(self) -> list[int]:
        """The engines that may be asked now; empty while all are down."""
        up, stragglers = self._up(), self.stragglers()
        return [engine for engine in up if engine not in stragglers] or up

    def _up(self) -> list[int]:
        return [engine for engine in range(self._count) if engine not in self._down]

    def lost(self, engine: int, error: EngineError) -> None:
        """The engine does not answer: nobody is sent there until it does."""
        if engine in self._down:
            return
        self._down[engine] = _Loss(time.monotonic(), error)
        self._versions.pop(engine, None)
        self._behind_since.pop(engine, None)
        if len(self._down) == self._count:
            self._some_up.clear()
        self._start(self._probe(engine))

    async def _probe(self, engine: int) -> None:
        loss = self._down[engine]
        while True:
            await asyncio.sleep(PROBE_S)
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
                await client.aclose()  # the next look has a client of its own
        del self._down[engine]
        self._some_up.set()

    def listen(self, silent: Callable[[int, EngineUnreachable], None]) -> None:
        """Of several engines: asks each for a sign of life, beside the caller; ``silent`` gets each that gives none for
        ``silent_s`` seconds, and why."""
        if self._count > 1:
            for engine in self._up():
                if engine not in self._listening:
                    self._listening.add(engine)
                    self._start(self._listen_to(engine, silent))

    async def _listen_to(self, engine: int, silent: Callable[[int, EngineUnreachable], None]) -> None:
        try:
            client = await self._client_for(engine, False)
            try:
                await client.answers(timeout_s=self._silent_s / 2)
            except EngineUnreachable:  # perhaps this process itself stood still: what has come meanwhile is read now
                await client.answers(timeout_s=self._silent_s / 2)
        except EngineUnreachable as error:
            silent(engine, error)
        finally:
            self._listening.discard(engine)

    async def wait_usable(self) -> None:
        """Returns once an engine may be asked. Raises EngineUnreachable with every engine's last words when none has
        answered for ``patience_s`` seconds since the last of them was lost."""
        while not self._some_up.is_set():
            left = max(loss.since for loss in self._down.values()) + self._patience_s - time.monotonic()
            try:
                await asyncio.wait_for(self._some_up.wait(), left)
            except TimeoutError:
                words = "; ".join(f"engine {engine}: {loss.error}" for engine, loss in sorted(self._down.items()))
                raise EngineUnreachable(
                    f"no engine has answered anything for {self._patience_s:g} s; last: {words}"
                ) from None

    # -- who lags behind ----------------------------------------------------------------------------------------------
    def serves(self, engine: int, version: int) -> None:
        """The engine showed that it has these weights."""
        if version > self._versions.get(engine, -1):
            self._versions[engine] = version
            self._note_lags()

    def _note_lags(self) -> None:
        newest, now = max(self._versions.values()), time.monotonic()
        for engine, version in self._versions.items():
            if newest - version <= self._max_lag:
                self._behind_since.pop(engine, None)
            else:
                self._behind_since.setdefault(engine, now)

    def stragglers(self) -> list[int]:
        """Engines that have been further behind the newest weights than the window for too long."""
        limit = time.monotonic() - self._lag_s
        return [engine for engine, since in self._behind_since.items() if since < limit]

    def lag_words(self, engine: int) -> str:
        return (
            f"engine {engine} serves weights {self._versions[engine]}, another one {max(self._versions.values())}: "
            f"more than {self._max_lag} behind for {self._lag_s:g} s. It gets no prompts until it has caught up"
        )

    # -- what they have to do -----------------------------------------------------------------------------------------
    def look(self, heard: Callable[[int, int], None]) -> None:
        """Asks all engines for their load and their weights, beside the caller and not too often; ``heard`` gets
        (engine, samples that run or wait there). One that has not answered the last time is not asked again: each
        look holds a thread that others need."""
        now = time.monotonic()
        if self._count > 1 and now - self._looked >= LOOK_S:
            self._looked = now
            for engine in self._up():
                if engine not in self._looking:
                    self._looking.add(engine)
                    self._start(self._look_at(engine, heard))

    async def _look_at(self, engine: int, heard: Callable[[int, int], None]) -> None:
        try:
            client = await self._client_for(engine, False)
            loads = await asyncio.to_thread(client.loads)
            version = str((await asyncio.to_thread(client.model_info))["weight_version"])
        except EngineError as error:  # whoever generates there finds out, and says so
            log.debug("%s", error)
            return
        finally:
            self._looking.discard(engine)
        if version.isdecimal():
            self.serves(engine, int(version))
        heard(engine, int(loads["num_running_reqs"]) + int(loads["num_waiting_reqs"]))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

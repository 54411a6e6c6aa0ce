"""Answers GET /health_generate: whether the engine could generate a token now, as probes of SGLang's servers ask."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.scheduler.token_sampler import NonFiniteLogits
from relax_core.engines.embedded.scheduler.token_scoring import ScoreItem
from relax_core.engines.http_server.asgi import HttpError

DEADLINE_S = 20.0  # the deadline of SGLang's own probe
REUSE_S = 1.0  # seconds for which one answer is given to further probes


class HealthGenerate:
    """Runs at most one forward pass of two tokens a second, however many probes come.

    The route needs no token. The pass runs in the decode thread between two steps. It takes no slot and shares no
    batch, so that the tokens of requests are the same with it and without it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._check: asyncio.Task[str | None] | None = None
        self._ended = 0.0

    async def __call__(self, body: bytes) -> dict[str, Any]:
        """Raises HttpError 503 with the reason if the engine generates no tokens."""
        if self._check is None or (self._check.done() and time.monotonic() - self._ended > REUSE_S):
            self._check = asyncio.create_task(self._checked())
        problem = await asyncio.shield(self._check)
        if problem is not None:
            raise HttpError(503, f"/health_generate: {problem}")
        return {"status": "ok"}

    async def _checked(self) -> str | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._problem()
        except TimeoutError:
            return f"the decode thread has not answered within {DEADLINE_S:g} s"
        finally:
            self._ended = time.monotonic()

    async def _problem(self) -> str | None:
        scheduler = self._scheduler
        if scheduler.version == NOTHING_ATTESTED:
            return "no weights are in yet"
        if scheduler.stands_still:
            return "the engine is paused, or its memory is released"
        try:
            await asyncio.wrap_future(scheduler.score([ScoreItem(token_ids=[0, 0], start=0, top_k=0, temperature=1.0)]))
        except NonFiniteLogits as error:
            return f"weight version {scheduler.version}: {error}"
        return None

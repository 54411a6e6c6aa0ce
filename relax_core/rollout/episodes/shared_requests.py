"""Sends turns of several episodes that are ready together to the engines in one request."""

from __future__ import annotations

import asyncio

import msgspec

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.pool.engine_pool import EnginePool


class SharedRequests:
    """Asks ``pool`` for one response per prompt.

    Prompts that are asked for in one iteration of the event loop and wait for the same weights share a request.
    """

    def __init__(self, pool: EnginePool, sampling: SamplingParams) -> None:
        self._pool = pool
        self._sampling = msgspec.structs.replace(sampling, n=1)
        self._ready: dict[int, list[tuple[PromptRequest, int, asyncio.Future[Generated]]]] = {}  # by weight version

    async def generate(self, request: PromptRequest, *, tie: int, tasks: asyncio.TaskGroup) -> Generated:
        """Returns the response to ``request``, whose ``rid`` must be unique.

        The call is cancelled if the pool gives the request up. ``tie`` chooses among equally loaded engines. A failure
        of the engines ends ``tasks``.
        """
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        ready = self._ready.setdefault(request.min_version, [])
        ready.append((request, tie, future))
        if len(ready) == 1:
            tasks.create_task(self._send(request.min_version))
        return await future

    async def cancel(self, rid: str) -> None:
        """Gives a request up, whose call of `generate` was cancelled; the engine stops it."""
        await self._pool.cancel([rid])

    async def _send(self, version: int) -> None:
        await asyncio.sleep(0)  # all episodes that are ready in this iteration add their requests first
        ready = [one for one in self._ready.pop(version) if not one[2].done()]  # the others were given up meanwhile
        if not ready:
            return
        requests = [request for request, _, _ in ready]
        async for number, (response,) in self._pool.generate(
            requests, self._sampling, places=[tie for _, tie, _ in ready]
        ):
            future = ready[number][2]
            if not future.done():  # a done future belongs to an episode that was given up
                future.set_result(response)
        for _, _, future in ready:
            future.cancel()  # a future without response belongs to a request that the pool gave up

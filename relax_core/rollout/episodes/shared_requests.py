"""Turns of several episodes that are ready together go to the engines in one request."""

from __future__ import annotations

import asyncio

import msgspec

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.pool.engine_pool import EnginePool


class SharedRequests:
    """Asks ``pool`` for one response a prompt. What is asked for in one round of the event loop, of prompts that wait
    for the same weights, is one request."""

    def __init__(self, pool: EnginePool, sampling: SamplingParams) -> None:
        self._pool = pool
        self._sampling = msgspec.structs.replace(sampling, n=1)
        self._ready: dict[int, list[tuple[PromptRequest, int, asyncio.Future[Generated]]]] = {}  # by weight version

    async def generate(self, request: PromptRequest, *, tie: int, tasks: asyncio.TaskGroup) -> Generated:
        """The response to ``request``, whose ``rid`` is nobody else's. Cancelled where the pool gives it up. ``tie``
        chooses among engines that are equally loaded. A failure of the engines ends ``tasks``."""
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        ready = self._ready.setdefault(request.min_version, [])
        ready.append((request, tie, future))
        if len(ready) == 1:
            tasks.create_task(self._send(request.min_version))
        return await future

    async def _send(self, version: int) -> None:
        await asyncio.sleep(0)  # until all that is ready in this round has asked
        ready = self._ready.pop(version)
        requests = [request for request, _, _ in ready]
        async for place, (response,) in self._pool.generate(
            requests, self._sampling, places=[tie for _, tie, _ in ready]
        ):
            future = ready[place][2]
            if not future.done():  # else its episode was given up
                future.set_result(response)
        for _, _, future in ready:
            future.cancel()  # those that the pool gave up

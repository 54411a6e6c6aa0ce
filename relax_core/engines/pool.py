"""Several engines behind one face: which prompt goes where, and what happens when one dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from relax_core.contracts.engine import EngineUnreachable, Generated, PromptRequest, SamplingParams
from relax_core.engines.client import EngineClient
from relax_core.engines.wire import StreamEnd

ClientFor = Callable[[int, bool], Awaitable[EngineClient]]
OnEnd = Callable[[StreamEnd], None]
Item = tuple[int, list[Generated]] | Exception | None


class EnginePool:
    """Routes whole prompts, so that a group shares one prefill. ``client_for(engine, fresh)`` gives the engine's
    client and may wait for an engine that is starting; after a failure it is asked for a fresh address.
    """

    def __init__(self, count: int, client_for: ClientFor, *, patience_s: float) -> None:
        self._count = count
        self._client_for = client_for
        self._patience_s = patience_s

    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        places: Sequence[int],
        on_end: OnEnd | None = None,
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        """Yields (prompt, its ``params.n`` responses) as soon as all of them are in, in order of completion.

        ``places[i]`` chooses prompt i's engine (modulo the number of engines). When an engine dies, the prompts whose
        groups are not complete are asked for again, until ``patience_s`` seconds passed after its loss without a reply.
        ``on_end`` gets each engine's own times.
        """
        queue: asyncio.Queue[Item] = asyncio.Queue()
        shares = [[i for i, place in enumerate(places) if place % self._count == e] for e in range(self._count)]
        tasks = [
            asyncio.create_task(self._share(engine, share, prompts, params, queue, on_end))
            for engine, share in enumerate(shares)
            if share
        ]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _share(
        self,
        engine: int,
        share: list[int],
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        queue: asyncio.Queue[Item],
        on_end: OnEnd | None,
    ) -> None:
        """One engine's prompts; ends with None, or with the error that nobody here can mend."""
        open_prompts = list(share)
        lost_since: float | None = None
        try:
            while open_prompts:
                try:
                    client = await self._client_for(engine, lost_since is not None)
                    parts: dict[int, list[Generated]] = {i: [] for i in open_prompts}
                    order = list(open_prompts)
                    async for one in client.generate([prompts[i] for i in order], params, on_end=on_end):
                        lost_since = None
                        place = order[one.prompt]
                        parts[place].append(msgspec.structs.replace(one, engine=f"engine-{engine}"))
                        if len(parts[place]) == params.n:
                            open_prompts.remove(place)
                            queue.put_nowait((place, parts[place]))
                except EngineUnreachable as error:
                    if lost_since is None:  # a long silence before, while it worked, is not held against it
                        lost_since = time.monotonic()
                    if time.monotonic() - lost_since > self._patience_s:
                        raise EngineUnreachable(
                            f"engine {engine} has answered nothing for {self._patience_s:g} s; last: {error}"
                        ) from error
                    await asyncio.sleep(0.1)  # its owner restarts it; do not hammer a port that nobody listens on
            queue.put_nowait(None)
        except Exception as error:  # crosses to the consumer, who raises it
            queue.put_nowait(error)

"""Sends turns of several episodes to the engines in one request: all that are ready, or all with one turn number.

`SharedRequests` never waits for further turns. `Lockstep` waits until every episode of a prompt batch is ready, so that
the requests of a run do not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.generate_messages import OnTokens

TellIds = Callable[[int, Sequence[int]], None]  # gets new tokens of a response, and the index of the first of them
# A request, its place among equally loaded engines, its response, and the callback for tokens during sampling.
Asked = tuple[PromptRequest, int, asyncio.Future[Generated], TellIds | None]


def start_in(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], *parts: Coroutine[Any, Any, Any]) -> None:
    """Starts ``work``, which awaits ``parts``, in a group of tasks.

    Raises CancelledError if the group is ending, because its tasks, including the caller, are then being cancelled.
    """
    try:
        tasks.create_task(work)
    except RuntimeError:
        for part in (work, *parts):
            part.close()
        raise asyncio.CancelledError from None


class SharedRequests:
    """Asks ``pool`` for one response per prompt.

    Prompts of one iteration of the event loop that wait for the same weights and stop at the same strings share a
    request.
    """

    def __init__(self, pool: EnginePool, sampling: SamplingParams) -> None:
        self._pool = pool
        self._sampling = msgspec.structs.replace(sampling, n=1)
        self._ready: dict[tuple[int, tuple[str, ...]], list[Asked]] = {}  # by weight version and stop strings

    async def generate(
        self,
        request: PromptRequest,
        *,
        tie: int,
        tasks: asyncio.TaskGroup,
        stop: tuple[str, ...] = (),
        tell: TellIds | None = None,
    ) -> Generated:
        """Returns the response to ``request``, whose ``rid`` must be unique.

        The call is cancelled if the pool cancels the request. ``tie`` chooses among equally loaded engines. A
        failure of the engines ends ``tasks``. The response also ends at one of the strings ``stop``. ``tell``
        gets its tokens while they are sampled; it may miss the last tokens.
        """
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        key = request.min_version, stop
        ready = self._ready.setdefault(key, [])
        ready.append((request, tie, future, tell))
        if len(ready) == 1:
            start_in(tasks, self._send(key))
        return await future

    async def cancel(self, rids: Sequence[str]) -> None:
        """Cancels requests whose calls of `generate` were cancelled; the engines stop them."""
        await self._pool.cancel(rids)

    async def _send(self, key: tuple[int, tuple[str, ...]]) -> None:
        await asyncio.sleep(0)  # all episodes that are ready in this iteration add their requests first
        await self.answer(self._ready.pop(key), stop=key[1])

    async def answer(self, asked: Sequence[Asked], *, stop: tuple[str, ...] = ()) -> None:
        """Sends prompts as one request, in their order, and sets their responses."""
        open_ones = [question for question in asked if not question[2].done()]  # the others were cancelled meanwhile
        if not open_ones:
            return
        requests = [request for request, _, _, _ in open_ones]
        places = [tie for _, tie, _, _ in open_ones]
        sampling = self._sampling
        if more := [stop_string for stop_string in stop if stop_string not in sampling.stop]:
            sampling = msgspec.structs.replace(sampling, stop=[*sampling.stop, *more])
        told: dict[str, Any] = {}
        if any(tell is not None for _, _, _, tell in open_ones):
            told["on_tokens"] = _token_callback(open_ones)
        async for number, (response,) in self._pool.generate(requests, sampling, places=places, **told):
            future = open_ones[number][2]
            if not future.done():  # a done future belongs to a cancelled episode
                future.set_result(response)
        for _, _, future, _ in open_ones:
            future.cancel()  # a future without a response belongs to a request that the pool cancelled


def _token_callback(asked: Sequence[Asked]) -> OnTokens:
    def tell(number: int, sample: int, start: int, ids: Sequence[int]) -> None:
        own = asked[number][3]
        if own is not None:
            own(start, ids)

    return tell


class Lockstep:
    """Sends the turns of a prompt batch together: each turn goes out when all its episodes are ready or have ended.

    ``episodes`` are the uids of all episodes of the batch; a request holds their prompts in this order. `run` must
    run concurrently with the episodes.
    """

    def __init__(self, requests: SharedRequests, episodes: Iterable[str]) -> None:
        self._requests = requests
        self._places = {uid: place for place, uid in enumerate(episodes)}
        self._playing = set(self._places)
        self._ready: dict[str, Asked] = {}
        self._changed = asyncio.Event()

    async def generate(self, request: PromptRequest, *, tie: int, episode: str) -> Generated:
        """Returns the response to a turn of ``episode``; `SharedRequests.generate` explains the rest."""
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._ready[episode] = (request, tie, future, None)
        self._changed.set()
        try:
            return await future
        finally:
            self._ready.pop(episode, None)  # it is still there if the episode is cancelled before its turn is sent

    def leave(self, episodes: Iterable[str]) -> None:
        """Reports that episodes have ended; the others no longer wait for them."""
        self._playing.difference_update(episodes)
        self._changed.set()

    async def run(self) -> None:
        """Sends turn after turn until all episodes have ended."""
        while self._playing:
            if self._ready.keys() >= self._playing:
                asked = [self._ready.pop(uid) for uid in sorted(self._ready, key=self._places.__getitem__)]
                await self._requests.answer(asked)
            else:
                self._changed.clear()
                await self._changed.wait()

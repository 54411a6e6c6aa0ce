"""Sends turns of several episodes in one engine request: all ready turns, or one turn of every episode.

`SharedRequests` sends all turns that are ready, without waiting for more. `Lockstep` waits until every episode of a
prompt batch has a ready turn. The requests of a run then do not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.generate_messages import OnTokens

TellIds = Callable[[int, Sequence[int]], None]  # receives an index, and new tokens from this index on
# A request, the number that chooses among equally loaded engines, the response, and the callback for sampled tokens.
Asked = tuple[PromptRequest, int, asyncio.Future[Generated], TellIds | None]


def start_in(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], *parts: Coroutine[Any, Any, Any]) -> None:
    """Starts ``work`` in a task group; ``parts`` are the coroutines that ``work`` awaits.

    If the task group is ending, closes all coroutines and raises CancelledError: the group's tasks, including the
    caller, are being cancelled.
    """
    try:
        tasks.create_task(work)
    except RuntimeError:
        for part in (work, *parts):
            part.close()
        raise asyncio.CancelledError from None


class SharedRequests:
    """Requests one response per prompt from ``pool``.

    Prompts share a request if they are added in the same iteration of the event loop, wait for the same weight version,
    and have the same stop strings.
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
        """Returns the response to ``request``. The ``rid`` of the request must be unique.

        The call is cancelled if the pool cancels the request. ``tie`` chooses among equally loaded engines. A failure
        of the engines ends ``tasks``. ``stop`` are further stop strings of the response. ``tell`` receives tokens while
        they are sampled, but possibly not the last tokens.
        """
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        key = request.min_version, stop
        ready = self._ready.setdefault(key, [])
        ready.append((request, tie, future, tell))
        if len(ready) == 1:
            start_in(tasks, self._send(key))
        return await future

    async def cancel(self, rids: Sequence[str]) -> None:
        """Stops requests in the engines; the calls of `generate` for these requests must have been cancelled."""
        await self._pool.cancel(rids)

    async def _send(self, key: tuple[int, tuple[str, ...]]) -> None:
        await asyncio.sleep(0)  # all episodes that are ready in this iteration first add their requests
        await self.answer(self._ready.pop(key), stop=key[1])

    async def answer(self, asked: Sequence[Asked], *, stop: tuple[str, ...] = ()) -> None:
        """Sends prompts as one request, in their order, and sets their responses."""
        open_ones = [question for question in asked if not question[2].done()]  # a done future was cancelled meanwhile
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
    """Sends turns of a prompt batch together, each time when all episodes of the batch are ready or have ended.

    ``episodes`` are the uids of all episodes of the batch. A request has the prompts in the order of ``episodes``.
    `run` must run concurrently with the episodes.
    """

    def __init__(self, requests: SharedRequests, episodes: Iterable[str]) -> None:
        self._requests = requests
        self._places = {uid: place for place, uid in enumerate(episodes)}
        self._playing = set(self._places)
        self._ready: dict[str, Asked] = {}
        self._changed = asyncio.Event()

    async def generate(self, request: PromptRequest, *, tie: int, episode: str) -> Generated:
        """Returns the response to a turn of ``episode``; `SharedRequests.generate` explains ``tie``."""
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._ready[episode] = (request, tie, future, None)
        self._changed.set()
        try:
            return await future
        finally:
            self._ready.pop(episode, None)  # needed if the episode is cancelled before its turn is sent

    def leave(self, episodes: Iterable[str]) -> None:
        """Reports that episodes have ended; the remaining episodes no longer wait for them."""
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

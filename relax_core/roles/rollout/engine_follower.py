"""Tells the pool of a rollout worker which engines the run has, as the controller's list changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from relax_core.engines.engine_pool import EnginePool
from relax_core.roles.engine_directory import EngineDirectory, member_list
from relax_core.roles.role_context import RunContext
from relax_core.weights.engine_members import MemberList

FOLLOW_S = 0.25  # the longest time after which a change of the list is noticed


async def engine_follower(context: RunContext, pool: EnginePool, directory: EngineDirectory) -> EngineFollower:
    """Returns what tells the pool, whose clients are those of ``directory``.

    The list has been read once, so the pool may get prompts.
    """
    follower = EngineFollower(pool, member_list(context), close_client=directory.close_client)
    await follower.read()
    return follower


class EngineFollower:
    """Tells ``pool`` which engines the run has; it belongs to the pool's event loop.

    ``close_client`` closes the pool's client of an engine that has left.
    """

    def __init__(
        self, pool: EnginePool, members: MemberList, *, close_client: Callable[[int], Awaitable[None]]
    ) -> None:
        self._close_client = close_client
        self._pool = pool
        self._members = members
        self._told = members.at_start
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.Lock()  # so that no older list is told after a newer one

    async def follow(self) -> None:
        """Reads the list until it is cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(FOLLOW_S)

    async def read(self) -> None:
        """Reads the list and tells the pool what has changed.

        Prompts of an engine whose samples are moved are moved at each call, because a request that was on its way to
        the engine when the state changed begins after the first abort.
        """
        async with self._reading:
            members = await asyncio.to_thread(self._members.read)
            moved = members.in_state("moving")
            if members != self._told or moved:
                gone = set(self._told.numbers) - set(members.numbers)
                self._told = members
                leaving = members.in_state("leaving", "moving")
                await self._pool.change_engines(members.in_state("serving"), leaving=leaving, moved=moved)
                for engine in gone:
                    await self._close_client(engine)

    async def _open_samples(self, engine: int) -> int:
        await self.read()
        return self._pool.open_samples(engine)

    def open_samples(self, engine: int, *, timeout_s: float) -> int:
        """Returns how many samples an engine still owes under the newest list; callable from any other thread.

        Raises TimeoutError if the event loop is not free in time.
        """
        return asyncio.run_coroutine_threadsafe(self._open_samples(engine), self._loop).result(timeout_s)

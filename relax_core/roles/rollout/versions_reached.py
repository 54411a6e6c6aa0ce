"""Waits for weight versions of the run, at which evaluations are due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relax_core.bus.ray_bus import RayBus
from relax_core.contracts.bus import BusClosed

CLOSED_S = 0.2


class VersionsReached:
    """Knows the newest version that the bus has told; one call of the bus at a time asks for a newer one.

    Must be used by one event loop. ``stopping`` says whether the worker ends.
    """

    def __init__(self, bus: RayBus, *, version: int, call_timeout_s: float, stopping: Callable[[], bool]) -> None:
        self._bus = bus
        self.version = version
        self._call_timeout_s = call_timeout_s
        self._stopping = stopping
        self._asking = asyncio.Lock()

    async def wait(self, version: int) -> None:
        """Returns when the run has reached ``version``; raises `BusClosed` if it ends before."""
        while self.version < version:
            async with self._asking:
                if self.version < version:
                    await self._ask()

    async def _ask(self) -> None:
        progress = await self._bus.wait_progress(self.version, timeout_s=self._call_timeout_s)
        if progress.version == self.version and self._stopping():
            raise BusClosed("the run ended before this version")
        if progress.version == self.version:
            await asyncio.sleep(CLOSED_S)  # a closed bus answers at once, so this limits the rate
        self.version = progress.version

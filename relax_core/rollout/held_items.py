"""Holds encoded images and videos at the bus, so that their tensors exist as long as this rollout worker has them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from relax_core.contracts.bus import BusClosed, BusLost, BusTimeout
from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.rollout.item_cache import ItemEncoder

ENCODINGS = 3  # of an item whose file is not there after it was encoded


class HoldingBus(Protocol):
    """Declares the calls of the bus that hold items."""

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Names items (digest → bytes) and returns the digests of those that are not stored."""

    async def let_go(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Ends the hold on items."""


class HeldItems:
    """Encodes items with ``encoder`` and holds each at the bus before anybody uses it. It implements `ItemEncoder`.

    ``worker`` is the rank of the rollout worker, and ``timeout_s`` the deadline of a call to the bus.
    """

    def __init__(self, encoder: ItemEncoder, bus: HoldingBus, *, worker: int, timeout_s: float) -> None:
        self._encoder = encoder
        self._bus = bus
        self._worker = worker
        self._timeout_s = timeout_s
        self._unused: dict[str, None] = {}  # items to be let go
        self._calling = asyncio.Lock()  # a hold never overtakes the end of an earlier one, nor the reverse
        self._letting_go: asyncio.Task[None] | None = None
        self._failure: BusLost | BusTimeout | None = None  # of the last call that let items go

    async def encode(self, source: MediaSource) -> MediaItem:
        """Returns the item, which the bus keeps until `let_go`.

        Raises `MediaError` if the source cannot be used, the errors of the bus, and RuntimeError if the item's file
        vanishes again and again.
        """
        for _ in range(ENCODINGS):
            item = await self._encoder.encode(source)
            async with self._calling:
                missing = await self._bus.hold(
                    {item.digest: item.nbytes}, worker=self._worker, timeout_s=self._timeout_s
                )
                # The cache may have let an equal item of another source go before or during the call.
                self._unused.pop(item.digest, None)
            if not missing:
                return item
        raise RuntimeError(
            f"{source.words}: the file of media item {item.digest} vanished {ENCODINGS} times after it was written. "
            "Does another program remove files of the run's media folder?"
        )

    def let_go(self, digest: str) -> None:
        """Ends the hold on an item soon; items that are let go together need one call."""
        self._unused[digest] = None
        if self._letting_go is None or self._letting_go.done():
            if self._failure is not None:
                raise self._failure
            self._letting_go = asyncio.get_running_loop().create_task(self._let_go_unused())

    async def _let_go_unused(self) -> None:
        while self._unused:
            async with self._calling:
                digests, self._unused = list(self._unused), {}
                try:
                    await self._bus.let_go(digests, worker=self._worker, timeout_s=self._timeout_s)
                except BusClosed:  # the run has ended, and its media folder ends with it
                    return
                except (BusLost, BusTimeout) as error:
                    self._failure = error
                    return

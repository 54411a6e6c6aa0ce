"""Caches the encoded media items (images, videos, sounds) of a run; each item is encoded once.

An item is identified by its source: the path of a file, or the digest of its bytes. The owner of an item is a prompt of
training or evaluation; it holds the item as long as the prompt is in use. Items without an owner are evicted when the
cache exceeds its limit of bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import xxhash

from relax_core.contracts.bus import BusClosed, BusLost, BusTimeout
from relax_core.contracts.media import MediaError, MediaItem, MediaReason, MediaSource

Key = tuple[str, str]  # the kind, and the path or the digest of the bytes
CACHE_BYTES = 1024 * 1_000_000  # limit of the encoded items that a rollout worker keeps for repeated prompts
MAX_ERRORS = 65_536  # number of remembered errors of sources that cannot be used
PASSING: tuple[MediaReason, ...] = ("timeout", "worker_killed")  # transient reasons


class ItemEncoder(Protocol):
    """Declares the method of encode workers that the cache calls."""

    async def encode(self, source: MediaSource) -> MediaItem:
        """Encodes a source, stores the tensors, returns the item. Raises `MediaError` if the source cannot be used."""


class ItemCache:
    """Returns media items by their sources, and encodes missing items.

    ``max_bytes`` limits the tensors of all items, including held items, but held items are not evicted.
    ``release_items`` is called with the digest of each evicted item. ``on_encoded`` is called with each new item and
    its source. ``encoded`` is the number of encodings.
    """

    def __init__(
        self,
        encoder: ItemEncoder,
        *,
        max_bytes: int,
        release_items: Callable[[str], None] = lambda digest: None,
        on_encoded: Callable[[MediaItem, MediaSource], None] = lambda item, source: None,
    ) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._let_go = release_items
        self._on_encoded = on_encoded
        self._items: dict[Key, MediaItem] = {}
        self._errors: OrderedDict[Key, MediaError] = OrderedDict()
        self._encoding: dict[Key, asyncio.Task[MediaItem]] = {}
        self._wanted_by: dict[Key, list[str]] = defaultdict(list)  # owners that wait for an encoding
        self._unused: OrderedDict[str, None] = OrderedDict()  # digests of items without an owner, the oldest first
        self._keys: dict[str, set[Key]] = defaultdict(set)
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._held: dict[str, Counter[str]] = {}  # by owner
        self._holders: Counter[str] = Counter()
        self.encoded = 0

    async def items(self, sources: Sequence[MediaSource], *, owner: str) -> list[MediaItem]:
        """Returns the items of these sources in order; ``owner`` holds them until `release`.

        Raises the `MediaError` of the first source that cannot be used; the owner then holds no item of this call.
        """
        found = await asyncio.gather(*(self._item(source, owner) for source in sources), return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException):
                for item in found:
                    if isinstance(item, MediaItem):
                        self._drop(owner, item.digest)
                raise outcome
        return [item for item in found if isinstance(item, MediaItem)]

    def release(self, owner: str) -> None:
        """Releases all items that ``owner`` holds or waits for; an owner without items is allowed."""
        for waiting in self._wanted_by.values():
            waiting[:] = [waiter for waiter in waiting if waiter != owner]
        for digest, count in self._held.pop(owner, Counter()).items():
            self._unhold(digest, count)
        self._evict()

    async def _item(self, source: MediaSource, owner: str) -> MediaItem:
        key = _key(source)
        error = self._errors.get(key)
        if error is not None:
            raise MediaError(error.kind, error.word, str(error))
        item = self._items.get(key)
        if item is not None:
            self._hold(owner, item.digest)
            return item
        if key not in self._encoding:
            self._encoding[key] = asyncio.create_task(self._encode(key, source))
        # `_encode` holds the item for its waiting owners. Otherwise the item could be evicted before the owners run
        # again.
        self._wanted_by[key].append(owner)
        return await asyncio.shield(self._encoding[key])

    async def _encode(self, key: Key, source: MediaSource) -> MediaItem:
        try:
            item = await self._encoder.encode(source)
        except MediaError as error:
            if error.word not in PASSING:
                self._errors[key] = error
                if len(self._errors) > MAX_ERRORS:
                    self._errors.popitem(last=False)
            raise
        finally:
            self._encoding.pop(key, None)
            owners = self._wanted_by.pop(key, [])
        self.encoded += 1
        self._on_encoded(item, source)
        self._items[key] = item
        self._keys[item.digest].add(key)
        if item.digest not in self._sizes:
            self._sizes[item.digest] = item.nbytes
            self._bytes += item.nbytes
        for owner in owners:
            self._hold(owner, item.digest)
        self._evict()
        return item

    def _hold(self, owner: str, digest: str) -> None:
        self._held.setdefault(owner, Counter())[digest] += 1
        self._holders[digest] += 1
        self._unused.pop(digest, None)

    def _drop(self, owner: str, digest: str) -> None:
        held = self._held.get(owner, Counter())
        if held[digest] > 0:
            held[digest] -= 1
            self._unhold(digest, 1)

    def _unhold(self, digest: str, count: int) -> None:
        self._holders[digest] -= count
        if self._holders[digest] <= 0:
            del self._holders[digest]
            self._unused[digest] = None

    def _evict(self) -> None:
        while self._unused and self._bytes > self._max_bytes:
            digest, _ = self._unused.popitem(last=False)
            for key in self._keys.pop(digest, ()):
                self._items.pop(key, None)
            self._bytes -= self._sizes.pop(digest)
            self._let_go(digest)


def _key(source: MediaSource) -> Key:
    if source.path is not None:
        return source.kind, source.path
    return source.kind, f"xxh3:{xxhash.xxh3_128_hexdigest(source.data or b'')}"


ENCODINGS = 3  # tries to encode an item if its file vanishes each time


class HoldingBus(Protocol):
    """Declares the calls of the bus that hold and release items."""

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Holds items (digest → bytes) at the bus, and returns the digests of items that are not stored."""

    async def release_items(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Releases held items."""


class HeldItems:
    """Encodes items with ``encoder``, and holds each item at the bus before its use. Implements `ItemEncoder`.

    ``worker`` is the rank of the rollout worker. ``timeout_s`` limits a call to the bus in seconds.
    """

    def __init__(self, encoder: ItemEncoder, bus: HoldingBus, *, worker: int, timeout_s: float) -> None:
        self._encoder = encoder
        self._bus = bus
        self._worker = worker
        self._timeout_s = timeout_s
        self._unused: dict[str, None] = {}  # items to release
        self._calling = asyncio.Lock()  # keeps holds and releases in order
        self._letting_go: asyncio.Task[None] | None = None
        self._failure: BusLost | BusTimeout | None = None  # the error of the last call that released items

    async def encode(self, source: MediaSource) -> MediaItem:
        """Encodes a source and returns the item; the bus keeps the item until `release_items`.

        Raises `MediaError` if the source cannot be used, the errors of the bus, and RuntimeError if the item's
        file vanishes repeatedly.
        """
        for _ in range(ENCODINGS):
            item = await self._encoder.encode(source)
            async with self._calling:
                missing = await self._bus.hold(
                    {item.digest: item.nbytes}, worker=self._worker, timeout_s=self._timeout_s
                )
                # The cache may have released an equal item of another source before or during this call.
                self._unused.pop(item.digest, None)
            if not missing:
                return item
        raise RuntimeError(
            f"{source.description}: the file of media item {item.digest} vanished {ENCODINGS} times after it was "
            "written. "
            "Does another program remove files of the run's media folder?"
        )

    def release_items(self, digest: str) -> None:
        """Releases an item soon; items that are released together need only one call."""
        self._unused[digest] = None
        if self._letting_go is None or self._letting_go.done():
            if self._failure is not None:
                raise self._failure
            self._letting_go = asyncio.get_running_loop().create_task(self._release_unused())

    async def _release_unused(self) -> None:
        while self._unused:
            async with self._calling:
                digests, self._unused = list(self._unused), {}
                try:
                    await self._bus.release_items(digests, worker=self._worker, timeout_s=self._timeout_s)
                except BusClosed:  # the run has ended, and its media folder ends with it
                    return
                except (BusLost, BusTimeout) as error:
                    self._failure = error
                    return

"""Tests the item cache: it encodes items once, keeps used items, cancels encodings without users, and caches errors."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from relax_core.contracts.media import MediaError, MediaItem, MediaReason, MediaSource
from relax_core.rollout.item_cache import ItemCache
from tests.media_items import image_item

SIZE = 100  # bytes of each item


class Encoder:
    """Encodes any path, and refuses paths that are names of reasons. Each encoding waits for `open`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.open = asyncio.Event()
        self.open.set()

    async def encode(self, source: MediaSource) -> MediaItem:
        name = source.path or (source.data or b"").decode()
        self.calls[name] += 1
        await self.open.wait()
        if name in ("truncated", "timeout"):
            word: MediaReason = "truncated" if name == "truncated" else "timeout"
            raise MediaError("image", word, f"{name}: refused")
        return msgspec.structs.replace(image_item(1, 1, seed=len(name) * 1000 + ord(name[-1])), nbytes=SIZE)


def path(name: str) -> MediaSource:
    return MediaSource(kind="image", path=name)


def test_an_item_is_encoded_once_also_for_those_that_ask_at_the_same_time() -> None:
    async def scene() -> None:
        encoder = Encoder()
        cache = ItemCache(encoder, max_bytes=10 * SIZE)
        encoder.open.clear()
        asked = [asyncio.create_task(cache.items([path("a"), path("b")], owner=f"g{number}")) for number in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        encoder.open.set()
        found = [await call for call in asked]
        assert all(items == found[0] for items in found) and [len(items) for items in found] == [2] * 8
        await cache.items([path("a"), MediaSource(kind="image", data=b"c")], owner="later")
        await cache.items([MediaSource(kind="image", data=b"c")], owner="later")
        assert encoder.calls == {"a": 1, "b": 1, "c": 1} and cache.encoded == 3

    asyncio.run(scene())


def test_items_that_somebody_holds_stay_and_the_oldest_others_are_let_go() -> None:
    async def scene() -> None:
        encoder, gone = Encoder(), list[str]()
        cache = ItemCache(encoder, max_bytes=2 * SIZE, release_items=gone.append)
        (first,) = await cache.items([path("a")], owner="one")
        other_items = [(await cache.items([path(name)], owner=name))[0] for name in "bcd"]
        assert gone == []  # all items are in use, so no item is evicted although the limit is exceeded
        for name in "bcd":
            cache.release(name)
        assert gone == [item.digest for item in other_items[:2]]  # the limit applies again; a is used, d is the newest
        await cache.items([path("a")], owner="two")
        cache.release("one")
        cache.release("one")  # a second release is not an error
        await cache.items([path("e")], owner="e")
        assert first.digest not in gone and gone[2:] == [other_items[2].digest]
        await cache.items([path("b")], owner="again")
        assert encoder.calls["b"] == 2 and encoder.calls["a"] == 1

    asyncio.run(scene())


def test_a_refused_item_frees_the_prompt_s_others_and_stays_refused_unless_time_ran_out() -> None:
    async def scene() -> None:
        encoder, gone = Encoder(), list[str]()
        cache = ItemCache(encoder, max_bytes=0, release_items=gone.append)
        for turn in range(2):
            for name in ("truncated", "timeout"):
                with pytest.raises(MediaError, match=f"{name}: refused") as told:
                    await cache.items([path("a"), path(name)], owner=f"g{turn}{name}")
                assert told.value.word == name and told.value.reason == f"bad_media:{name}"
                cache.release(f"g{turn}{name}")
        assert encoder.calls["truncated"] == 1 and encoder.calls["timeout"] == 2
        assert len(gone) == encoder.calls["a"]  # no item is in use, so no item is cached

    asyncio.run(scene())

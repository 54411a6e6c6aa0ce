"""Tests that the bus stores exactly the items of the item cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_core.bus.factory import create_bus
from relax_core.config.schema import BusConfig
from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.rollout.item_cache import HeldItems, ItemCache
from tests.bus.blocking import BlockingBus
from tests.bus.make_media import make_item
from tests.bus.make_rows import make_settings

T = 60.0
WaitUntil = Callable[..., None]


class Encoder:
    """Writes an image of random pixels for each path. Removes the first ``vanishing`` files again."""

    def __init__(self, folder: Path, *, vanishing: int = 0) -> None:
        self.folder = folder
        self.vanishing = vanishing

    async def encode(self, source: MediaSource) -> MediaItem:
        item, _ = await asyncio.to_thread(make_item, self.folder, int(source.path or 0))
        if self.vanishing:
            self.vanishing -= 1
            (self.folder / item.digest).unlink()
        return item


@pytest.fixture
def bus(ray_session: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BlockingBus]:
    folder = tmp_path / "media"
    folder.mkdir()
    made = create_bus(
        BusConfig(name="ray"),
        make_settings(media_folder=str(folder)),
        ledger_path=tmp_path / "ledger.sqlite",
        name=request.node.name,
        namespace="test-held-items",
    )
    yield BlockingBus(made)
    made.terminate()


def source(number: int) -> MediaSource:
    return MediaSource(kind="image", path=str(number))


def test_the_items_of_the_cache_stay_and_no_others(bus: BlockingBus, wait_until: WaitUntil) -> None:
    folder = Path(bus.settings.media_folder)

    async def use() -> dict[str, MediaItem]:
        held = HeldItems(Encoder(folder), bus.bus, worker=0, timeout_s=T)
        size = make_item(folder, 0)[0].nbytes
        cache = ItemCache(held, max_bytes=3 * size, release_items=held.release_items)
        choose = random.Random(0)
        kept: dict[str, MediaItem] = {}
        for turn in range(60):  # each iteration evicts items; some items are encoded again at once
            wanted = [choose.randrange(6) for _ in range(3)]
            items = await cache.items([source(number) for number in wanted], owner=str(turn))
            kept = {item.digest: item for item in items}
            for item in items:
                bus.media_reader(timeout_s=T).tensors(item)
            if turn < 59:
                cache.release(str(turn))
        return kept

    kept = asyncio.run(use())
    wait_until(lambda: bus.progress(timeout_s=T).media_items <= 3, what="the end of the holds")
    wait_until(lambda: len(list(folder.iterdir())) <= 3, what="the removal of the files")
    for item in kept.values():
        bus.media_reader(timeout_s=T).tensors(item)


def test_an_item_whose_file_vanished_is_encoded_again(bus: BlockingBus) -> None:
    folder = Path(bus.settings.media_folder)
    held = HeldItems(Encoder(folder, vanishing=2), bus.bus, worker=0, timeout_s=T)
    item = asyncio.run(held.encode(source(1)))
    bus.media_reader(timeout_s=T).tensors(item)
    with pytest.raises(RuntimeError, match=r"2: the file of media item [0-9a-f]{32} vanished 3 times"):
        asyncio.run(HeldItems(Encoder(folder, vanishing=9), bus.bus, worker=0, timeout_s=T).encode(source(2)))

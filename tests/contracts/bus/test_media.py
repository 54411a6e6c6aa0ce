"""Tests that media items are stored once, stay while they are in use, and are then removed.

Each test runs with one folder shared by all nodes, and with a folder for each node.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_core.contracts.media import MediaItem
from tests.bus.blocking import BlockingBus
from tests.bus.make_media import held, make_item, media_columns
from tests.bus.make_rows import for_actor, for_worker, make_row

MakeBus = Callable[..., BlockingBus]
WaitUntil = Callable[..., None]
T = 60.0
PLACES = ("one folder", "nodes")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a media folder in shared memory."""
    made = Path(tempfile.mkdtemp(prefix=f"{Path(tempfile.gettempdir()).name}-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def is_stored(bus: BlockingBus, item: MediaItem) -> bool:
    try:
        bus.media_reader(timeout_s=T).tensors(item)
    except ValueError:
        return False
    return True


def media_bus(make_bus: MakeBus, folder: Path, place: str, **changes: object) -> BlockingBus:
    own = folder / "media" if place == "nodes" else folder
    return make_bus(media_folder=str(own), media_nodes=place == "nodes", **changes)


@pytest.mark.parametrize("place", PLACES)
def test_a_group_keeps_its_items_until_it_ends(
    make_bus: MakeBus, folder: Path, place: str, wait_until: WaitUntil
) -> None:
    bus = media_bus(make_bus, folder, place)
    folder = bus.media_folder(timeout_s=T)
    admissions = bus.admit(4, timeout_s=T)
    (shared, frames), (own, _) = make_item(folder, 1), make_item(folder, 2)
    assert bus.hold(held(shared, own), timeout_s=T) == []
    bus.put(
        [
            make_row(admissions[0], columns=media_columns([shared, own, own])),
            make_row(admissions[1], columns=media_columns([])),
            make_row(admissions[2], version=0, columns=media_columns([shared])),
        ],
        timeout_s=T,
    )
    bus.release_items([shared.digest, own.digest, own.digest], timeout_s=T)
    progress = bus.progress(timeout_s=T)
    assert (progress.media_items, progress.media_bytes) == (2, shared.nbytes + own.nbytes)
    lease = bus.lease(for_actor(0), timeout_s=T)
    mapped = bus.media_reader(timeout_s=T).tensors(shared)["frames"]
    np.testing.assert_array_equal(mapped, frames)
    assert not mapped.flags.writeable
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    wait_until(lambda: not is_stored(bus, own), what="the removal of the item")
    assert is_stored(bus, shared)
    bus.release([bus.lease(for_actor(1, at_least=1), timeout_s=T).lease_id], timeout_s=T)
    bus.revoke("actor", timeout_s=T)
    assert is_stored(bus, shared)
    lease = bus.lease(for_actor(1, at_least=1), timeout_s=T)
    bus.ack([lease.lease_id], step=1, dropped={}, timeout_s=T)
    wait_until(lambda: not is_stored(bus, shared), what="the removal of the item")
    assert bus.progress(timeout_s=T).media_items == 0
    assert list(folder.iterdir()) == []
    np.testing.assert_array_equal(mapped, frames)  # a reader's mapping stays valid


@pytest.mark.parametrize("place", PLACES)
def test_a_lease_keeps_the_items_of_a_group_that_ended(
    make_bus: MakeBus, folder: Path, place: str, wait_until: WaitUntil
) -> None:
    bus = media_bus(make_bus, folder, place, max_staleness=0, groups_per_step=1)
    folder = bus.media_folder(timeout_s=T)
    item, _ = make_item(folder, 1)
    assert bus.hold(held(item), timeout_s=T) == []
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first), make_row(second, version=0, columns=media_columns([item]))], timeout_s=T)
    working = bus.lease(for_worker(groups=2), timeout_s=T)
    bus.release_items([item.digest], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)  # the second group is stale now
    assert bus.progress(timeout_s=T).ledger.dropped == {"stale": 2}
    assert is_stored(bus, item)
    bus.write(working.lease_id, {row.group_uid: {"b": b"y"} for row in working.rows}, timeout_s=T)
    wait_until(lambda: not is_stored(bus, item), what="the removal of the item")


@pytest.mark.parametrize("place", PLACES)
def test_holds_are_of_one_worker_and_missing_items_are_named(
    make_bus: MakeBus, folder: Path, place: str, wait_until: WaitUntil
) -> None:
    bus = media_bus(make_bus, folder, place)
    folder = bus.media_folder(timeout_s=T)
    item, _ = make_item(folder, 1)
    (folder / item.digest).unlink()
    assert bus.hold(held(item), worker=0, timeout_s=T) == [item.digest]
    make_item(folder, 1)
    assert bus.hold(held(item), worker=0, timeout_s=T) == []
    assert bus.hold(held(item), worker=1, timeout_s=T) == []
    assert [file.name for file in folder.iterdir()] == [item.digest]
    bus.release_items([item.digest, "f" * 32], worker=0, timeout_s=T)
    assert is_stored(bus, item)
    bus.release_items([item.digest], worker=0, timeout_s=T)
    assert is_stored(bus, item)
    bus.release_items([item.digest], worker=1, timeout_s=T)
    for _ in range(20):  # a removal in progress never removes an item that a worker acquires again
        if bus.hold(held(item), timeout_s=T):
            make_item(folder, 1)
            assert bus.hold(held(item), timeout_s=T) == []
        assert is_stored(bus, item)
        bus.release_items([item.digest], timeout_s=T)
    wait_until(lambda: not is_stored(bus, item), what="the removal of the item")


@pytest.mark.parametrize("place", PLACES)
def test_items_of_a_lost_worker_stay_until_its_groups_are_complete(
    make_bus: MakeBus, folder: Path, place: str, wait_until: WaitUntil
) -> None:
    bus = media_bus(make_bus, folder, place)
    folder = bus.media_folder(timeout_s=T)
    prompt, cached = make_item(folder, 1)[0], make_item(folder, 2)[0]
    bus.admit(2, worker=0, timeout_s=T)
    assert bus.hold(held(prompt, cached), worker=0, timeout_s=T) == []
    first, second = bus.reclaim(worker=0, timeout_s=T)
    make_item(folder, 1)  # the worker's successor encodes the prompt again
    assert bus.hold(held(prompt), worker=0, timeout_s=T) == []
    bus.put([make_row(first, columns=media_columns([prompt]))], timeout_s=T)
    assert is_stored(bus, cached)
    bus.drop(second.group_uid, reason="engine failed", timeout_s=T)
    wait_until(lambda: not is_stored(bus, cached), what="the removal of the item")
    assert is_stored(bus, prompt)
    bus.reclaim(worker=0, timeout_s=T)
    assert is_stored(bus, prompt), "the group waits for the trainer"
    assert bus.progress(timeout_s=T).media_items == 1


@pytest.mark.parametrize("place", PLACES)
def test_a_restored_bus_names_only_what_workers_hold(
    make_bus: MakeBus, folder: Path, place: str, wait_until: WaitUntil
) -> None:
    bus = media_bus(make_bus, folder, place)
    folder = bus.media_folder(timeout_s=T)
    waiting, cached = make_item(folder, 1)[0], make_item(folder, 2)[0]
    assert bus.hold(held(waiting, cached), timeout_s=T) == []
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission, columns=media_columns([waiting]))], timeout_s=T)
    bus.release_items([waiting.digest], timeout_s=T)
    bus.restore(bus.snapshot(timeout_s=T), timeout_s=T)
    wait_until(lambda: not is_stored(bus, waiting), what="the removal of the item")
    assert is_stored(bus, cached)
    (again,) = bus.admit(1, timeout_s=T)
    assert again.index == admission.index
    make_item(folder, 1)
    assert bus.hold(held(waiting), timeout_s=T) == []
    bus.put([make_row(again, columns=media_columns([waiting]))], timeout_s=T)
    assert is_stored(bus, waiting)


def test_wrong_calls_are_refused(make_bus: MakeBus, folder: Path) -> None:
    bus = media_bus(make_bus, folder, "one folder", max_row_bytes=4096)
    folder = bus.media_folder(timeout_s=T)
    item, _ = make_item(folder, 1)
    large, _ = make_item(folder, 2, height=56)
    first, second = bus.admit(2, timeout_s=T)
    with pytest.raises(ValueError, match=f"uses media item {item.digest}, which has no holder"):
        bus.put([make_row(first, columns=media_columns([item]))], timeout_s=T)
    assert bus.hold(held(item, large), timeout_s=T) == []
    with pytest.raises(ValueError, match=rf"bytes, {large.nbytes} of them in media items, the largest group has 4096"):
        bus.put([make_row(first), make_row(second, columns=media_columns([large]))], timeout_s=T)
    assert bus.progress(timeout_s=T).in_flight == 2
    with pytest.raises(ValueError, match=r"'\.\./x' is not a digest of a media item"):
        bus.hold({"../x": 1}, timeout_s=T)
    with pytest.raises(ValueError, match="this run has no media"):
        make_bus().hold(held(item), timeout_s=T)

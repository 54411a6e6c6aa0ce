"""Tests media items on two Ray nodes of this machine with different folders."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_core.bus.factory import create_bus
from relax_core.config.schema import BusConfig
from relax_core.contracts.bus import BusLost
from relax_core.contracts.media import MediaGone, MediaItem
from relax_core.contracts.media_file import node_folder
from relax_core.roles.process_placement import node_id
from tests.bus.blocking import BlockingBus
from tests.bus.make_media import held, make_item, media_columns
from tests.bus.make_rows import for_actor, make_row, make_settings

T = 60.0
WaitUntil = Callable[..., None]
SIZE = 280  # pixels; the item is too large for a Ray message


@pytest.fixture(scope="module")
def second(ray_session: str) -> Iterator[Node]:
    """Yields a second node of the session's Ray."""
    cluster = Cluster(initialize_head=False, shutdown_at_exit=False)
    cluster.head_node = ray._private.worker._global_node
    node = cluster.add_node(wait=False, num_cpus=0, object_store_memory=80 << 20, node_ip_address="127.0.0.1")
    yield node
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    deadline = time.monotonic() + T
    while any(
        ray_node["Alive"] for ray_node in ray.nodes() if ray_node["NodeID"] == node.node_id
    ):  # Ray places actors there
        assert time.monotonic() < deadline, "Ray has not noticed the end of the second node"
        time.sleep(0.05)


@pytest.fixture
def other_node(second: Node) -> str:
    return str(second.node_id)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=f"{Path(tempfile.gettempdir()).name}-", dir="/dev/shm"))
    yield made
    made.rmdir()  # each node's process has removed its own folder


@pytest.fixture
def bus(other_node: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Any:
    made = create_bus(
        BusConfig(name="ray"),
        make_settings(media_folder=str(folder / "media"), media_nodes=True),
        ledger_path=tmp_path / "ledger.sqlite",
        name=request.node.name,
        namespace="test-media-nodes",
        node_options={"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id(), soft=False)},
    )
    yield BlockingBus(made)
    made.terminate()
    wait_until(lambda: not list(folder.iterdir()), what="the end of the folders")


def look(bus: BlockingBus, items: list[MediaItem]) -> tuple[int, list[np.ndarray], bytes]:
    """Maps items like a rank. Returns the process id, the items' frames and the maps of the process."""
    reader = bus.media_reader(timeout_s=T)
    reader.fetch(items)
    mapped = [reader.tensors(item)["frames"] for item in items]
    assert not any(array.flags.writeable for array in mapped)
    return os.getpid(), [array.copy() for array in mapped], Path("/proc/self/maps").read_bytes()


def names_in(*folders: Path) -> dict[Path, list[str]]:
    return {folder: [file.name for file in folder.iterdir()] for folder in folders}


def on_node(node_id: str, function: Callable[..., Any]) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=where)


def test_a_node_gets_an_item_once_and_loses_it_with_the_others(
    bus: BlockingBus, other_node: str, folder: Path, wait_until: WaitUntil
) -> None:
    here, there = bus.media_folder(timeout_s=T), node_folder(folder / "media", other_node)
    assert here != there and not there.exists()
    made = [make_item(here, seed, height=SIZE, width=SIZE) for seed in range(3)]
    items = [item for item, _ in made]
    assert bus.hold(held(*items), timeout_s=T) == []
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission, columns=media_columns(items[:2]))], timeout_s=T)
    bus.release_items([item.digest for item in items[:2]], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    ranks = [on_node(other_node, look).remote(bus, items[:2]) for _ in range(3)]  # concurrent ranks of one node
    for pid, frames, maps in ray.get(ranks, timeout=T):
        assert pid != os.getpid() and str(there).encode() in maps and str(here).encode() not in maps
        for frame, (_, expected) in zip(frames, made, strict=False):
            np.testing.assert_array_equal(frame, expected)
    assert {file.name for file in there.iterdir()} == {item.digest for item in items[:2]}
    first = (there / items[0].digest).stat()
    assert first.st_mode & 0o777 == 0o600
    bus.fetch_media([item.digest for item in items], node_id=other_node, timeout_s=T)  # like an engine's client
    assert {file.name for file in there.iterdir()} == {item.digest for item in items}
    assert (there / items[0].digest).stat().st_ino == first.st_ino, "it was transferred once"
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    left = {here: [items[2].digest], there: [items[2].digest]}
    wait_until(lambda: names_in(here, there) == left, what="the removal of items")
    with pytest.raises(MediaGone, match=f"media {items[0].digest}: the bus has no such item"):
        bus.fetch_media([items[0].digest], node_id=other_node, timeout_s=T)
    again, _ = make_item(here, 0, height=SIZE, width=SIZE)
    assert bus.hold(held(again), timeout_s=T) == []
    ray.get(on_node(other_node, look).remote(bus, [again]), timeout=T)
    bus.release_items([item.digest for item in (again, items[2])], timeout_s=T)
    wait_until(lambda: names_in(here, there) == {here: [], there: []}, what="the removal of items")


def test_a_lost_node_is_named_and_leaves_no_file(
    bus: BlockingBus, second: Node, other_node: str, folder: Path, wait_until: WaitUntil
) -> None:
    here, there = bus.media_folder(timeout_s=T), node_folder(folder / "media", other_node)
    item, _ = make_item(here, 1)
    assert bus.hold(held(item), timeout_s=T) == []
    bus.fetch_media([item.digest], node_id=other_node, timeout_s=T)
    second.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    wait_until(lambda: not there.exists(), what="the end of the node's folder")
    late, _ = make_item(here, 2)
    assert bus.hold(held(late), timeout_s=T) == []
    with pytest.raises(BusLost, match=f"keeps the media items of node {other_node} has exited"):
        bus.fetch_media([late.digest], node_id=other_node, timeout_s=T)
    bus.release_items([item.digest, late.digest], timeout_s=T)
    wait_until(lambda: not list(here.iterdir()), what="the removal on the node that is left")

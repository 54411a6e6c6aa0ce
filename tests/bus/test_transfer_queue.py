"""Tests features of the TransferQueue backend only: where payloads are stored and freed, and how processes end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.bus.factory import connect_bus, create_bus
from relax_core.bus.transfer_queue_bus import TransferQueueBus
from relax_core.bus.transfer_queue_plane import NewSample, StoredColumns, abandoned, new_key
from relax_core.config.schema import BusConfig
from relax_core.contracts.bus import BusLost, BusTimeout, LeaseLost
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row, make_settings

T = 120.0
LONG_S = 400.0  # longer than T: a call that waits for this timeout fails the test
NAMESPACE = "test-transfer-queue"
PIXELS = bytes(range(256)) * 400  # beyond inline_bytes


@contextmanager
def a_bus(tmp_path: Path, name: str) -> Iterator[BlockingBus]:
    """Yields a bus with separate processes: a controller and a storage unit."""
    made = create_bus(
        BusConfig(name="transfer_queue"),
        make_settings(max_staleness=0),
        ledger_path=tmp_path / f"{name}.sqlite",
        name=name,
        namespace=NAMESPACE,
        socket_folder=Path(tempfile.gettempdir()),
    )
    assert isinstance(made, TransferQueueBus)
    bus = BlockingBus(made)
    try:
        bus.open()
        yield bus
    finally:
        with suppress(BusLost):
            bus.close(reason="the test is over", timeout_s=T)
        bus.terminate()


@pytest.fixture(scope="module")
def bus(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingBus]:
    """Returns a bus for tests that leave no open group and no stored payload."""
    with a_bus(tmp_path_factory.mktemp("bus"), "shared") as bus:
        yield bus


def keys(bus: BlockingBus) -> list[str]:
    """Returns the keys that TransferQueue stores for this bus."""
    client = bus.open()
    return asyncio.run(client.call(client.keys(bus.location.partition), timeout_s=T, what="a list of keys"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + T
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train_step(bus: BlockingBus, columns: dict[str, bytes]) -> None:
    """Trains one step of two groups, with a column that another role writes."""
    step = bus.progress(timeout_s=T).version
    rows = [make_row(a, version=step, columns=columns) for a in bus.admit(2, timeout_s=T)]
    bus.put(rows, timeout_s=T)
    lease = bus.lease(for_worker(groups=2), timeout_s=T)
    bus.write(lease.lease_id, {row.group_uid: {"advantages": PIXELS} for row in rows}, timeout_s=T)
    lease = bus.lease(for_actor(step), timeout_s=T)
    bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)


def test_transfer_queue_carries_every_payload_and_is_empty_after_each_group(bus: BlockingBus) -> None:
    step = bus.progress(timeout_s=T).version
    rows = [make_row(a, version=step, columns={"a": b"small", "pixels": PIXELS}) for a in bus.admit(2, timeout_s=T)]
    bus.put(rows, timeout_s=T)
    assert sorted(key.partition(":")[0] for key in keys(bus)) == [row.group_uid for row in rows]
    worker = bus.lease(for_worker(groups=2), timeout_s=T)
    bus.write(worker.lease_id, {row.group_uid: {"advantages": b"1"} for row in rows}, timeout_s=T)
    assert len(keys(bus)) == 4
    lease = bus.lease(for_actor(step), timeout_s=T)
    bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
    wait_for(lambda: keys(bus) == [])


def test_many_steps_leave_nothing(bus: BlockingBus) -> None:
    for _ in range(20):
        train_step(bus, {"a": PIXELS})
    wait_for(lambda: keys(bus) == [])


def test_rows_that_were_refused_or_came_twice_or_late_are_freed(bus: BlockingBus) -> None:
    step = bus.progress(timeout_s=T).version
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first, version=step), make_row(second, version=step)], timeout_s=T)
    bus.put([make_row(first, version=step), make_row(first, version=step)], timeout_s=T)
    with pytest.raises(ValueError, match="was never admitted"):
        bus.put([make_row(first.__class__(index=10**6, group_uid="g01000000", min_version=0))], timeout_s=T)
    with pytest.raises(LeaseLost):
        bus.write(10**6, {first.group_uid: {"b": b"late"}}, timeout_s=T)
    wait_for(lambda: len(keys(bus)) == 2)
    lease = bus.lease(for_actor(step), timeout_s=T)
    assert [bytes(row.columns["a"]) for row in lease.rows] == [b"%s" % row.group_uid.encode() for row in lease.rows]
    bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
    wait_for(lambda: keys(bus) == [])


def test_what_a_dead_writer_left_is_swept(bus: BlockingBus) -> None:
    import ray

    client = bus.open()
    dead = NewSample(f"g00000000:aaaa:{time.time() - 1:.0f}", {"a": PIXELS})
    alive = NewSample.of("g00000001", {"a": PIXELS}, timeout_s=T)
    asyncio.run(client.call(client.put(bus.location.partition, [dead, alive]), timeout_s=T, what="a put"))
    ray.get(bus._actor.sweep.remote(), timeout=T)
    wait_for(lambda: keys(bus) == [alive.key])
    asyncio.run(client.call(client.clear(bus.location.partition, [alive.key]), timeout_s=T, what="a clear"))


def test_abandoned_keys() -> None:
    key = new_key("g00000001", timeout_s=10.0)
    assert abandoned([key], {}, now=time.time()) == []
    assert abandoned([key], {}, now=time.time() + 1000.0) == [key]
    assert abandoned([key], {key: object()}, now=time.time() + 1000.0) == []


def test_an_index_that_another_sample_has_now_is_not_read(bus: BlockingBus) -> None:
    """TransferQueue assigns a freed index to the next sample. A slow reader must not get the payload of this sample."""
    client, partition = bus.open(), bus.location.partition

    def put(uid: str) -> StoredColumns:
        ((stored,),) = asyncio.run(
            client.call(
                client.put(partition, [NewSample.of(uid, {"a": uid.encode()}, timeout_s=T)]), timeout_s=T, what="a put"
            )
        )
        return stored

    def clear(stored: StoredColumns) -> None:
        asyncio.run(client.call(client.clear(partition, [stored.key]), timeout_s=T, what="a clear"))

    first = put("g00000001")
    clear(first)
    with pytest.raises(LeaseLost, match="g00000001"):
        asyncio.run(client.call(client.get(partition, [first]), timeout_s=T, what="a get"))
    samples = [put(f"g0000001{number}") for number in range(10)]
    deadline = time.monotonic() + T
    while first.index not in [sample.index for sample in samples]:  # a freed index may be reused only later
        assert time.monotonic() < deadline
        samples.append(put(f"g0000001{len(samples)}"))
    with pytest.raises(LeaseLost, match="g00000001"):
        asyncio.run(client.call(client.get(partition, [first]), timeout_s=T, what="a get"))
    clear(first)  # frees no sample, because samples are cleared by key
    assert len(asyncio.run(client.call(client.get(partition, samples), timeout_s=T, what="a get"))) == len(samples)
    for sample in samples:
        clear(sample)


def test_payloads_outlive_their_producer(bus: BlockingBus) -> None:
    import ray

    step = bus.progress(timeout_s=T).version

    def produce(bus: BlockingBus) -> None:
        rows = [make_row(a, version=step, columns={"a": PIXELS}) for a in bus.admit(2, timeout_s=T)]
        bus.put(rows, timeout_s=T)

    producer: Any = ray.remote(num_cpus=0, max_calls=1)(produce)  # the process ends with the call
    ray.get(producer.remote(bus), timeout=180)
    second_bus = BlockingBus(connect_bus("shared", NAMESPACE))
    lease = second_bus.lease(for_actor(step), timeout_s=T)
    payload = lease.rows[0].columns["a"]
    assert payload == PIXELS
    assert isinstance(payload, memoryview) and payload.readonly
    second_bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)


def test_nothing_listens_on_the_network_and_nobody_else_may_enter(bus: BlockingBus) -> None:
    servers = bus.location.plane.servers
    assert len(servers) == 2
    for server in servers:
        ours = {int(port) for port in server.ports.values()}
        assert {file.name for file in Path(server.folder).iterdir()} == {str(port) for port in ours}
        listening = psutil.Process(server.pid).net_connections("inet")
        ray_only = [connection for connection in listening if connection.status == "LISTEN"]
        assert len(ray_only) <= 1, f"more ports than Ray's: {ray_only}"
        above = Path(server.folder).parent
        assert stat.S_IMODE(above.stat().st_mode) == 0o700


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_server_is_named_to_all_who_wait_and_nothing_stays(
    ray_session: str, tmp_path: Path, victim: int
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with a_bus(tmp_path, f"killed{victim}") as bus, ThreadPoolExecutor(1) as pool:
        servers = bus.location.plane.servers
        admissions = bus.admit(2, timeout_s=T)
        waiting = pool.submit(bus.lease, for_worker(), timeout_s=LONG_S)
        wait_for(lambda: len(bus.waits(timeout_s=T)) == 1)
        os.kill(servers[victim].pid, signal.SIGKILL)
        with pytest.raises(BusLost, match=f"{servers[victim].title} has exited"):
            waiting.result(timeout=T)
        with pytest.raises(BusLost, match=f"{servers[victim].title} has exited"):
            pool.submit(bus.put, [make_row(admission) for admission in admissions], timeout_s=LONG_S).result(timeout=T)
        with pytest.raises(BusLost, match=f"{servers[victim].title} has exited"):
            pool.submit(bus.progress, timeout_s=LONG_S).result(timeout=T)
    assert not [server.pid for server in servers if psutil.pid_exists(server.pid)]
    assert not Path(servers[0].folder).parent.exists()


def test_a_stopped_server_is_named_and_ends_with_the_bus(ray_session: str, tmp_path: Path) -> None:
    with a_bus(tmp_path, "stopped") as bus:
        servers = bus.location.plane.servers
        admissions = bus.admit(2, timeout_s=T)
        os.kill(servers[1].pid, signal.SIGSTOP)
        with pytest.raises(BusTimeout, match=f"no answer to a put within 1.0 s.*{servers[1].title}"):
            bus.put([make_row(admission) for admission in admissions], timeout_s=1.0)
    assert not [server.pid for server in servers if psutil.pid_exists(server.pid)]

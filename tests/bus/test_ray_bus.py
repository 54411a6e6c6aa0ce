"""Tests features of the Ray backend only: processes, the object store, asynchronous methods."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.bus.factory import connect_bus, create_bus
from relax_core.bus.ray_bus import RayBus
from relax_core.config.schema import BusConfig
from relax_core.contracts.bus import BusClosed, BusLost, BusTimeout
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row, make_settings

T = 120.0
NAMESPACE = "test-ray-backend"


def make_config(name: str = "ray") -> BusConfig:
    return BusConfig(name=name)


@pytest.fixture
def bus(ray_session: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BlockingBus]:
    made = create_bus(
        make_config(),
        make_settings(),
        ledger_path=tmp_path / "ledger.sqlite",
        name=request.node.name,
        namespace=NAMESPACE,
    )
    yield BlockingBus(made)
    made.terminate()


@pytest.mark.parametrize("module", ["bus_actor", "transfer_queue_bus"])
def test_a_bus_process_imports_no_torch(module: str) -> None:
    """Workers that Ray starts without a fork server import only the modules of their actor."""
    program = f"import sys; import relax_core.bus.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=T, check=False).returncode == 0


def test_large_payloads_outlive_their_producer_and_are_not_copied(
    bus: BlockingBus, request: pytest.FixtureRequest
) -> None:
    import ray

    payload = os.urandom(3_000_000)

    def produce(bus: BlockingBus) -> int:
        (admission,) = bus.admit(1, timeout_s=T)
        bus.put([make_row(admission, columns={"a": b"x", "pixels": payload})], timeout_s=T)
        return os.getpid()

    producer: Any = ray.remote(num_cpus=0, max_calls=1)(produce)  # the process ends with the call
    ray.get(producer.remote(bus), timeout=180)
    second_bus = BlockingBus(connect_bus(request.node.name, NAMESPACE))
    lease = second_bus.lease(for_worker(("pixels",)), timeout_s=T)
    pixels = lease.rows[0].columns["pixels"]
    assert isinstance(pixels, memoryview) and pixels.readonly
    assert pixels == payload
    again = second_bus.lease(for_worker(("pixels",), task="reader"), timeout_s=T).rows[0].columns["pixels"]
    assert np.shares_memory(np.frombuffer(pixels, np.uint8), np.frombuffer(again, np.uint8))


def test_one_event_loop_waits_for_several_calls(bus: BlockingBus) -> None:
    async def rollout(bus: RayBus) -> int:
        first, second = await bus.admit(2, timeout_s=T)
        await bus.put([make_row(first)], timeout_s=T)
        await bus.drop(second.group_uid, reason="engine failed", timeout_s=T)
        await bus.admit(100, timeout_s=T)
        with pytest.raises(BusTimeout, match="rollout waits for credit"):
            await bus.admit(1, timeout_s=0.05)
        waiting = asyncio.create_task(bus.admit(1, timeout_s=T))
        await bus.close(reason="the end", timeout_s=T)
        with pytest.raises(BusClosed, match="the end"):
            await waiting
        return first.index

    assert asyncio.run(rollout(bus.bus)) == 0
    assert bus.progress(timeout_s=T).waiting == 1


def test_wait_progress(bus: BlockingBus) -> None:
    bus.put([make_row(admission) for admission in bus.admit(2, timeout_s=T)], timeout_s=T)
    assert bus.wait_progress(0, timeout_s=0.05).version == 0
    lease = bus.lease(for_actor(0), timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    assert bus.wait_progress(0, timeout_s=T).version == 1
    bus.close(reason="the end", timeout_s=T)
    assert bus.wait_progress(1, timeout_s=T).version == 1


def test_an_event_loop_ends_though_a_wait_for_progress_was_cancelled(bus: BlockingBus) -> None:
    async def scene() -> bool:
        waiting = asyncio.create_task(bus.bus.wait_progress(0, timeout_s=600.0))
        await asyncio.wait([waiting], timeout=0.2)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=T)
        return waiting.cancelled()

    ended: list[bool] = []
    loop = threading.Thread(target=lambda: ended.append(asyncio.run(scene())), daemon=True)
    loop.start()
    loop.join(60)
    assert ended == [True], "a thread that waits for the bus would block the loop for 600 s"


CALLS: list[Callable[[BlockingBus], object]] = [
    lambda bus: bus.progress(timeout_s=T),
    lambda bus: bus.lease(for_worker(), timeout_s=T),
    lambda bus: bus.admit(1, timeout_s=T),
]


def test_a_killed_bus_is_named(bus: BlockingBus) -> None:
    os.kill(bus.process_id(timeout_s=T), signal.SIGKILL)
    for call in CALLS:
        with pytest.raises(BusLost, match="the bus process has exited"):
            call(bus)


def test_names_that_do_not_exist(ray_session: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no bus named 'nobody' runs in namespace"):
        connect_bus("nobody", NAMESPACE)
    place: dict[str, Any] = {"ledger_path": tmp_path / "ledger.sqlite", "name": "x", "namespace": NAMESPACE}
    with pytest.raises(ValueError, match=r"bus=foo is not built\. What exists for bus: ray, transfer_queue"):
        create_bus(make_config("foo"), make_settings(), **place)
    with pytest.raises(ValueError, match="groups_per_step=0 is too small"):
        make_settings(groups_per_step=0)

"""Tests the resource usage of a process and its children on real processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from relax_core.observe import process_usage
from relax_core.observe.process_usage import (
    ProcessUsage,
    UsageMeter,
    children_of,
    gpu_usages,
    usage_numbers,
)

BUSY = "import time\nprint('up', flush=True)\nend = time.time() + 600\nwhile time.time() < end: pass"
DEADLINE_S = 120.0


def test_a_busy_child_counts_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "USAGE_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert child.pid in children_of(process_usage.os.getpid())
        meter = UsageMeter()
        assert meter.newest() is None, "one measurement gives no rate"
        deadline = time.monotonic() + DEADLINE_S
        while (usage := meter.newest()) is None or usage.children_cores < 0.01:
            assert time.monotonic() < deadline, usage
            time.sleep(0.05)
        assert usage.children >= 1 and usage.memory_mb > 10 and usage.children_memory_mb > 1
        alone = UsageMeter(child.pid)
        while (of_child := alone.newest()) is None or of_child.cores < 0.01:
            assert time.monotonic() < deadline, of_child
            time.sleep(0.05)
        assert of_child.children == 0 and of_child.gpus == ()
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    time.sleep(0.25)
    assert alone.newest() is None and children_of(child.pid) == set(), "a process that has ended uses nothing"


def test_a_measurement_is_not_made_more_often_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "USAGE_S", 0.0)
    meter = UsageMeter()
    meter.newest()
    first = meter.newest()
    monkeypatch.setattr(process_usage, "USAGE_S", 600.0)
    assert first is not None and meter.newest() is first


def test_the_numbers_of_a_process() -> None:
    alone = ProcessUsage(cores=0.5, memory_mb=100.0)
    assert usage_numbers("actor-0", alone) == {"actor-0/cores": 0.5, "actor-0/memory_mb": 100.0}
    whole = ProcessUsage(
        cores=0.5,
        memory_mb=100.0,
        children=2,
        children_cores=1.5,
        children_memory_mb=30.0,
        gpus=(process_usage.GpuUsage(index=1, busy=0.9, memory_mb=7000.0),),
    )
    assert usage_numbers("engine-1", whole) == {
        "engine-1/cores": 0.5,
        "engine-1/memory_mb": 100.0,
        "engine-1/children": 2.0,
        "engine-1/children_cores": 1.5,
        "engine-1/children_memory_mb": 30.0,
        "engine-1/gpu1_busy": 0.9,
        "engine-1/gpu1_memory_mb": 7000.0,
    }


def test_a_process_without_gpus_of_its_own_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(gpu_usages()) == []

"""Tests the recorded metrics of processes and engines."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from relax_core.control.engine_set import EngineSet
from relax_core.control.process_metrics import EngineMetrics, ProcessMetrics
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.observe import process_usage
from relax_core.observe.process_usage import ProcessUsage
from relax_core.observe.stragglers import DecodeTime, DecodeTimes
from relax_core.roles.worker import EngineReport, WorkerStatus

DEADLINE_S = 60.0


def test_workers_tell_themselves_and_the_controller_measures_itself_and_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_usage, "USAGE_S", 0.05)
    records: list[Mapping[str, float]] = []
    numbers = ProcessMetrics(
        bus_pid=os.getpid(),
        record=lambda step, values: records.append(values),
    )
    usage = ProcessUsage(cores=0.5, memory_mb=300.0)
    status = WorkerStatus(name="actor-0", state="running", since=0.0, pid=1, detail="", error=None, usage=usage)
    beats = {
        "actor-0": WorkerHeartbeat(name="actor-0", life="alive", status=status),
        "actor-1": WorkerHeartbeat(name="actor-1", life="restarting", status=status),
    }
    deadline = time.monotonic() + DEADLINE_S
    while not records or "bus/memory_mb" not in records[-1]:
        assert time.monotonic() < deadline
        numbers.record(beats, step=4)
    newest = records[-1]
    assert newest["actor-0/cores"] == 0.5
    assert newest["controller/memory_mb"] > 10 and newest["bus/memory_mb"] > 10
    assert not any(name.startswith("actor-1") for name in newest), "its process has ended"


# -- Recorded and compared metrics of the engines of a run without a gateway ------------------------------------------


def beat(number: int, **report: Any) -> WorkerHeartbeat:
    name = f"engine-{number}"
    engine = EngineReport(url=f"http://h:{number}", version=3, **report) if report else None
    status = WorkerStatus(
        name=name, state="running", since=0.0, pid=1, detail="", error=None, restarts=1, engine=engine
    )
    return WorkerHeartbeat(name=name, life="alive", status=status)


def test_the_numbers_come_once_a_step_and_the_decode_times_are_compared() -> None:
    records: list[tuple[int, Mapping[str, float]]] = []
    compared: list[tuple[int, Mapping[str, DecodeTimes]]] = []
    numbers = EngineMetrics(
        EngineSet(3),
        record=lambda step, values: records.append((step, values)),
        add_decoding=lambda step, engines: compared.append((step, engines)),
    )
    numbers.record({}, step=1)
    assert records == [], "no engine has answered"
    counted = {"running": 2, "waiting": 5, "decode_times": ((8, 10, 0.5, 0.25),)}
    beats = {f"engine-{number}": beat(number, **counted) for number in range(2)} | {"engine-2": beat(2)}
    for _ in range(2):
        numbers.record(beats, step=1)
    ((step, values),) = records
    assert step == 1 and {name: value for name, value in values.items() if name.startswith("engine-1")} == {
        "engine-1/version": 3.0,
        "engine-1/running": 2.0,
        "engine-1/waiting": 5.0,
        "engine-1/restarts": 1.0,
    }
    assert values["engine-2/version"] == -1.0, "the engine is starting"
    own = {8: DecodeTime(10, 0.5, 0.25)}
    assert compared == [(1, {"engine-0": own, "engine-1": own})]

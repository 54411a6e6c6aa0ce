"""What is recorded of the processes of a run: workers by their statuses, and this process itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import pytest

from relax_core.control.process_numbers import ProcessNumbers
from relax_core.control.worker_health import Beat
from relax_core.observe import process_usage
from relax_core.observe.process_usage import ProcessUsage
from relax_core.roles.worker import WorkerStatus

DEADLINE_S = 60.0


def test_workers_tell_themselves_and_the_controller_measures_itself_and_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_usage, "USAGE_S", 0.05)
    records: list[Mapping[str, float]] = []
    numbers = ProcessNumbers(
        bus_pid=os.getpid(),
        record=lambda step, values: records.append(values),
    )
    usage = ProcessUsage(cores=0.5, memory_mb=300.0)
    status = WorkerStatus(name="actor-0", state="running", since=0.0, pid=1, detail="", error=None, usage=usage)
    beats = {
        "actor-0": Beat(name="actor-0", life="alive", status=status),
        "actor-1": Beat(name="actor-1", life="restarting", status=status),
    }
    deadline = time.monotonic() + DEADLINE_S
    while not records or "bus/memory_mb" not in records[-1]:
        assert time.monotonic() < deadline
        numbers.record(beats, step=4)
    newest = records[-1]
    assert newest["actor-0/cores"] == 0.5
    assert newest["controller/memory_mb"] > 10 and newest["bus/memory_mb"] > 10
    assert not any(name.startswith("actor-1") for name in newest), "its process has gone"

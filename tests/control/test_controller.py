"""A run stalls without train steps, but not while its trainer writes a checkpoint, however slowly."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.control.controller import TRAINER, Controller
from relax_core.control.recoveries import ServicesLost
from relax_core.control.worker_health import Beat, RoleWatch
from relax_core.roles.worker import WorkerStatus
from tests.roles.run_context import context_in

LONG_S = 1000.0  # more than run.start_timeout_s and run.stall_timeout_s together


def beat_of(*, progress: int) -> Beat:
    status = WorkerStatus(
        name=TRAINER,
        state="running",
        since=time.time(),
        pid=1,
        detail="writes checkpoint of step 7",
        error=None,
        progress=progress,
    )
    return Beat(name=TRAINER, life="alive", status=status)


def controller(folder: Path) -> Controller:
    nothing: Any = SimpleNamespace(
        bus=None,
        bus_pid=1,
        alarms=SimpleNamespace(happened=print, over=print, look=print),
        engines=SimpleNamespace(added=lambda *states: []),
        view=SimpleNamespace(stragglers=SimpleNamespace(add_decoding=print), check_trackers=print),
        events=SimpleNamespace(record=print),
        book=None,
        serve=None,
        recoveries=None,
        supervisor=None,
        record_statuses=lambda statuses: None,
        handles=dict,
    )
    return Controller(context_in(folder), nothing, nothing)


def test_a_checkpoint_that_is_being_written_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = controller(tmp_path)
    monkeypatch.setattr("relax_core.control.stall_report.REPORTS", 1e-6)  # no report, which asks the workers
    monkeypatch.setattr(run._health, "check", lambda **given: None)
    (stall,) = [check for check in run.checks() if check.name == "stall"]
    for progress in (1, 2, 3):  # no train step ends meanwhile
        run._watchdog._since -= LONG_S
        run._health.beats = {TRAINER: beat_of(progress=progress)}
        run._health.roles = RoleWatch().roles(run._health.beats)
        run._look_at_workers()
        assert stall.look() is None
    run._watchdog._since -= LONG_S
    finding = stall.look()
    assert finding is not None
    with pytest.raises(
        ServicesLost,
        match=r"no train step ended for .*run\.stall_timeout_s.*actor-0 running .* writes checkpoint of step 7",
    ):
        stall.act(finding)

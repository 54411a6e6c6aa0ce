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


class Health:
    """A health manager whose trainer has the status that the test sets."""

    def __init__(self) -> None:
        self.beats: dict[str, Beat] = {}
        self._watch = RoleWatch()

    def set_status(self, *, progress: int, detail: str) -> None:
        status = WorkerStatus(
            name=TRAINER, state="running", since=time.time(), pid=1, detail=detail, error=None, progress=progress
        )
        self.beats = {TRAINER: Beat(name=TRAINER, life="alive", status=status)}
        self.roles = self._watch.roles(self.beats)

    def progress(self, name: str) -> int:
        status = self.beats[name].status
        assert status is not None
        return status.progress

    def check(self, *, bus_lost: str | None, step: int) -> None:
        """Does nothing, because the test sets the status."""


def controller(health: Any, folder: Path) -> Controller:
    context = context_in(folder)
    nothing: Any = SimpleNamespace(
        lost=None,
        record_statuses=lambda statuses: None,
        error=lambda: None,
        moved=lambda: None,
        check=lambda *beats, step: None,
        report=lambda beats, step: "",
    )
    return Controller(
        context,
        nothing,
        bus=nothing,
        serve_deployments=nothing,
        recoveries=nothing,
        view=nothing,
        health=health,
        watchdog=nothing,
        engines=nothing,
        engine_numbers=nothing,
        process_numbers=nothing,
        supervisor=nothing,
    )


def test_a_checkpoint_that_is_being_written_is_no_stall(tmp_path: Path) -> None:
    health = Health()
    run = controller(health, tmp_path)
    for progress in (1, 2, 3):  # no train step ends meanwhile
        run._moved -= LONG_S
        health.set_status(progress=progress, detail="writes checkpoint of step 7")
        run._check()
        run._check_stall()
    run._moved -= LONG_S
    run._check()
    with pytest.raises(ServicesLost, match=r"no train step ended for .*actor-0 running .* writes checkpoint of step 7"):
        run._check_stall()

"""Tests that a worker starts by itself, reports its state, keeps its first failure and stops on request."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.contracts.bus import BusClosed, BusLost
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.worker import Worker
from tests.roles.run_context import context_in


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return context_in(tmp_path_factory.mktemp("run"))


class Scripted(Worker):
    def __init__(self, context: RunContext, script: Callable[[Scripted], None]) -> None:
        self._script = script
        super().__init__("scripted-0", context)

    def work(self) -> None:
        self._script(self)


def test_it_works_from_the_start_and_is_done_when_work_returns(
    context: RunContext, wait_until: Callable[..., None]
) -> None:
    go = threading.Event()

    def script(worker: Scripted) -> None:
        worker.set_state("running", "step 3")
        assert go.wait(120.0)

    before = time.time()
    worker = Scripted(context, script)
    assert not worker.join(0.01)
    wait_until(lambda: worker.status().detail == "step 3", what="its first word")
    status = worker.status()
    assert (status.name, status.state, status.detail, status.error) == ("scripted-0", "running", "step 3", None)
    assert status.pid == os.getpid() and before <= status.since <= time.time()
    go.set()
    assert worker.join(120.0)
    assert worker.status().state == "done"


def test_the_progress_of_a_long_call_is_reported(context: RunContext) -> None:
    go = threading.Event()

    def script(worker: Scripted) -> None:
        assert go.wait(60.0)
        worker.report_progress("writes checkpoint of step 3")
        worker.report_progress("writes checkpoint of step 3")
        raise BusClosed(worker.status().detail)

    worker = Scripted(context, script)
    assert worker.status().progress == 0
    go.set()
    assert worker.join(60.0)
    assert (worker.status().progress, worker.status().detail) == (2, "writes checkpoint of step 3")


def test_a_stop_is_asked_for_and_not_forced(context: RunContext) -> None:
    def script(worker: Scripted) -> None:
        while not worker.stopping:
            time.sleep(0.001)

    worker = Scripted(context, script)
    assert not worker.join(0.01)
    worker.request_stop()
    assert worker.join(120.0)
    assert worker.status().state == "done"


def test_a_closed_bus_is_an_end_and_no_failure(context: RunContext) -> None:
    def script(worker: Scripted) -> None:
        raise BusClosed("all 4 train steps are done")

    worker = Scripted(context, script)
    assert worker.join(120.0)
    status = worker.status()
    assert (status.state, status.detail, status.error) == ("done", "all 4 train steps are done", None)


def test_a_failure_is_kept_with_its_traceback(context: RunContext) -> None:
    def script(worker: Scripted) -> None:
        raise ValueError("data row 3: too long")

    worker = Scripted(context, script)
    assert worker.join(120.0)
    status = worker.status()
    assert (status.state, status.detail) == ("failed", "ValueError: data row 3: too long")
    assert status.error is not None and "Traceback" in status.error and "in script" in status.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_ends_the_loop_s_thread_is_a_failure(context: RunContext, error: BaseException) -> None:
    def script(worker: Scripted) -> None:
        raise error

    worker = Scripted(context, script)
    assert worker.join(120.0)
    status = worker.status()
    assert status.state == "failed" and type(error).__name__ in status.detail and status.error is not None


def test_since_is_when_the_state_changed_not_its_detail(context: RunContext) -> None:
    seen: list[float] = []

    def script(worker: Scripted) -> None:
        for detail in ("step 1", "step 2"):
            worker.set_state("running", detail)
            seen.append(worker.status().since)
            time.sleep(0.002)
        worker.set_state("waiting")
        seen.append(worker.status().since)

    worker = Scripted(context, script)
    assert worker.join(120.0)
    assert seen[0] == seen[1] < seen[2]


def test_names_and_folders(context: RunContext, tmp_path: Path) -> None:
    assert worker_name("engine", 1) == "engine-1"
    assert context.log_dir == context.run_dir / "logs"


def test_the_status_names_the_awaited_data(context: RunContext, wait_until: Callable[..., None]) -> None:
    inside, go = threading.Event(), threading.Event()

    def script(worker: Scripted) -> None:
        with worker.waiting("8 groups", on="bus"), worker.waiting("a push", on="engine"):
            inside.set()
            assert go.wait(120.0)

    before = time.time()
    worker = Scripted(context, script)
    assert inside.wait(120.0)
    first, second = worker.status().waits
    assert (first.what, first.on, second.what, second.on) == ("8 groups", "bus", "a push", "engine")
    assert before <= first.since <= second.since <= time.time()
    wait_until(lambda: "go.wait(120.0)" in worker.stacks()["scripted-0-loop"], what="the line behind inside.set()")
    assert "in script" in worker.stacks()["scripted-0-loop"]
    go.set()
    assert worker.join(120.0)
    assert worker.status().waits == ()


def test_a_worker_that_lost_another_says_so(context: RunContext) -> None:
    def script(worker: Scripted) -> None:
        raise BusLost("the bus process is gone")

    worker = Scripted(context, script)
    assert worker.join(120.0)
    assert (worker.status().state, worker.status().lost) == ("failed", "bus")

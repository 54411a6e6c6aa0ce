from __future__ import annotations

import time

import pytest

from relax_core.control.watch import RoleWatch, RunFailed, run_failed
from relax_core.roles.worker import State, WorkerStatus


def status(
    name: str,
    state: State = "running",
    *,
    pid: int = 1,
    since: float = 0.0,
    restarts: int = 0,
    error: str | None = None,
) -> WorkerStatus:
    return WorkerStatus(
        name=name, state=state, since=since, pid=pid, detail=f"{name}'s words", error=error, restarts=restarts
    )


def test_states_as_the_panel_shows_them() -> None:
    now = time.time()
    actor, engine = RoleWatch().roles(
        {"actor-0": status("actor-0", since=now - 5), "engine-0": status("engine-0", "waiting", restarts=2)}
    )
    assert (actor.name, actor.state, actor.detail, actor.restarts) == ("actor-0", "running", "actor-0's words", 0)
    assert actor.since_s >= 5
    assert (engine.state, engine.restarts) == ("waiting", 2)


def test_a_new_process_is_a_restart_and_adds_to_those_it_owns() -> None:
    watch = RoleWatch()
    counts = [
        watch.roles({"engine-0": status("engine-0", pid=pid, restarts=own)})[0].restarts
        for pid, own in [(1, 0), (1, 1), (2, 0), (2, 0), (3, 4)]
    ]
    assert counts == [0, 1, 1, 1, 6]


def test_a_worker_without_a_status() -> None:
    watch = RoleWatch()
    watch.roles({"rollout-0": status("rollout-0", pid=1)})
    watch.roles({"rollout-0": status("rollout-0", pid=2)})
    (restarting,) = watch.roles({"rollout-0": "restarting"})
    assert (restarting.state, restarting.restarts) == ("restarting", 1)
    (silent,) = watch.roles({"rollout-0": "silent"})
    assert (silent.state, silent.detail) == ("waiting", "silent")


def test_the_first_failure_is_the_cause() -> None:
    statuses = {
        "actor-0": status("actor-0", "failed", since=20.0, error="late"),
        "rollout-0": status("rollout-0", "failed", since=10.0, error="Traceback\n  early"),
        "engine-0": "dead: later still",
    }
    with pytest.raises(RunFailed) as failure:
        RoleWatch().roles(statuses)
    assert str(failure.value) == "rollout-0 failed: rollout-0's words"
    assert failure.value.log == "Traceback\n  early"


def test_a_dead_process_ends_the_run_in_one_line() -> None:
    with pytest.raises(RunFailed) as failure:
        RoleWatch().roles({"actor-0": "dead: its process was killed\nclass_name: X", "engine-0": status("engine-0")})
    assert str(failure.value) == "actor-0 is dead: its process was killed"
    assert "class_name: X" in failure.value.log


def test_an_error_outside_of_any_worker_keeps_its_traceback_for_the_logs() -> None:
    try:
        int("x")
    except ValueError as error:
        failure = run_failed("the run did not start", error)
    assert str(failure) == "the run did not start: ValueError: invalid literal for int() with base 10: 'x'"
    assert "Traceback" in failure.log and "Traceback" not in str(failure)

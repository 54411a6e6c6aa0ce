from __future__ import annotations

import time
from typing import Any

import pytest

from relax_core.control.recoveries import RunFailed, ServicesLost, run_failed
from relax_core.control.worker_health import Beat, RoleWatch, verdict
from relax_core.roles.failure import Lost
from relax_core.roles.worker import State, WorkerStatus


def status(name: str, state: State = "running", *, since: float = 0.0, **more: Any) -> WorkerStatus:
    reported: dict[str, Any] = {"pid": 1, "error": None} | more
    return WorkerStatus(name=name, state=state, since=since, detail=f"{name}'s words", **reported)


def alive(name: str, state: State = "running", *, silent_s: float = 0.0, **more: Any) -> Beat:
    return Beat(name=name, life="alive", status=status(name, state, **more), silent_s=silent_s)


def dead(name: str) -> Beat:
    return Beat(name=name, life="dead", status=status(name), cause="The actor died\nclass_name: X")


def beats(*given: Beat) -> dict[str, Beat]:
    return {beat.name: beat for beat in given}


def judge(*given: Beat, bus: str | None = None, killed: dict[str, str] | None = None, sure: bool = True) -> Any:
    return verdict(beats(*given), bus=bus, killed=killed or {}, sure=sure)


def test_states_as_the_panel_shows_them() -> None:
    now = time.time()
    actor, engine = RoleWatch().roles(
        beats(alive("actor-0", since=now - 5), alive("engine-0", "waiting", restarts=2, silent_s=7.0))
    )
    assert (actor.name, actor.state, actor.detail, actor.restarts) == ("actor-0", "running", "actor-0's words", 0)
    assert actor.since_s >= 5
    assert (engine.state, engine.restarts) == ("waiting", 2)
    assert engine.detail == "silent for 7 s; engine-0's words"


def test_a_new_process_is_a_restart_and_adds_to_those_it_owns() -> None:
    watch = RoleWatch()
    counts = [
        watch.roles(beats(alive("engine-0", pid=pid, restarts=own)))[0].restarts
        for pid, own in [(1, 0), (1, 1), (2, 0), (2, 0), (3, 4)]
    ]
    assert counts == [0, 1, 1, 1, 6]


def test_a_worker_that_restarts_keeps_its_count() -> None:
    watch = RoleWatch()
    watch.roles(beats(alive("rollout-0", pid=1)))
    watch.roles(beats(alive("rollout-0", pid=2)))
    (restarting,) = watch.roles(beats(Beat(name="rollout-0", life="restarting", status=status("rollout-0"))))
    assert (restarting.state, restarting.restarts) == ("restarting", 1)
    (exited,) = watch.roles(beats(dead("rollout-0")))
    assert (exited.state, exited.detail) == ("failed", "its process has exited")


def test_what_a_roles_own_code_raised_ends_the_run_once_that_is_sure() -> None:
    given = (
        alive("actor-0", "failed", since=20.0, error="late"),
        alive("rollout-0", "failed", since=10.0, error="Traceback\n  early"),
    )
    assert judge(*given, sure=False) is None
    failure = judge(*given)
    assert type(failure) is RunFailed
    assert (str(failure), failure.worker) == ("rollout-0 failed: rollout-0's words", "rollout-0")
    assert failure.log == "Traceback\n  early"


@pytest.mark.parametrize("lost", ["rank", "engine", "process", "time"])
def test_a_worker_that_failed_of_another_is_a_loss_and_no_failure(lost: Lost) -> None:
    failure = judge(alive("actor-0", "failed", lost=lost, error="trace"), sure=False)
    assert type(failure) is ServicesLost
    assert str(failure) == "actor-0 failed: actor-0's words"


def test_of_a_dead_bus_the_bus_is_the_cause_whoever_noticed_first() -> None:
    victim = alive("rollout-0", "failed", lost="bus", error="trace")
    assert str(judge(victim)) == "the bus died"
    assert str(judge(victim, bus="froze: no answer")) == "the bus froze: no answer"
    assert type(judge(victim)) is ServicesLost


def test_a_death_is_the_cause_of_the_failures_beside_it() -> None:
    failure = judge(alive("actor-0", "failed", since=1.0, error="gloo: connection closed"), dead("actor-1"))
    assert type(failure) is ServicesLost
    assert str(failure) == "actor-1 died"
    assert "class_name: X" in failure.log


def test_of_several_deaths_the_one_that_was_brought_about_is_the_cause() -> None:
    failure = judge(dead("actor-0"), dead("actor-1"), killed={"actor-1": "froze and was killed"})
    assert str(failure) == "actor-1 froze and was killed (and with it actor-0)"


def test_all_is_well() -> None:
    starting = Beat(name="engine-0", life="starting", status=None)
    restarting = Beat(name="rollout-0", life="restarting", status=status("rollout-0", "failed"))
    assert judge(alive("actor-0"), alive("advantages-0", "done"), starting, restarting) is None


def test_an_error_outside_of_any_worker_keeps_its_traceback_for_the_logs() -> None:
    try:
        int("x")
    except ValueError as error:
        failure = run_failed("the run did not start", error)
    assert str(failure) == "the run did not start: ValueError: invalid literal for int() with base 10: 'x'"
    assert "Traceback" in failure.log and "Traceback" not in str(failure)

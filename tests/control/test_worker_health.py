"""Tests the worker check on real Ray actors: it kills frozen workers, records restarts, and raises losses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.monitor import LONGEST_GAP_S
from relax_core.contracts.process_trees import EXITED, kill, process_state
from relax_core.control.recoveries import Recoveries, RunFailed, ServicesLost, run_failed
from relax_core.control.worker_health import Heartbeats, RoleWatch, WorkerHealth, WorkerHeartbeat, verdict
from relax_core.roles.failure import Lost
from relax_core.roles.worker import State, WorkerStatus, process_host

DEADLINE_S = 120.0
HEARTBEAT_S, START_S = 1.0, 10.0


class Clock:
    """The clock of the heartbeats. Only the test advances the clock, so no process looks frozen on a slow machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Role:
    """A worker with a status that the test sets. With ``gate`` its start waits for this file."""

    def __init__(self, name: str, gate: Path | None = None) -> None:
        while gate is not None and not gate.exists():
            time.sleep(0.01)
        self.reported: dict[str, Any] = {"name": name, "state": "running", "since": 0.0, "detail": "", "error": None}

    def status(self) -> WorkerStatus:
        return WorkerStatus(pid=os.getpid(), host=process_host(), **self.reported)

    def set_status(self, **reported: Any) -> None:
        self.reported |= reported


class Services:
    """Fake services for the health check."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}

    def handles(self) -> Mapping[str, Any]:
        return self.workers

    def dispensable(self) -> Collection[str]:
        return set()

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        kill(status.pid)

    def start(self, name: str, *, max_restarts: int, gate: Path | None = None) -> None:
        import ray

        self.workers[name] = ray.remote(Role).options(num_cpus=0, max_restarts=max_restarts).remote(name, gate)


@pytest.fixture
def services(ray_session: str) -> Iterator[Services]:
    import ray

    services = Services()
    yield services
    for worker in services.workers.values():
        ray.kill(worker)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(services: Services, clock: Clock, tmp_path: Path) -> WorkerHealth:
    recoveries = Recoveries(tmp_path / "recoveries.json", report=lambda text: None)
    return WorkerHealth(services, recoveries, heartbeat_timeout_s=HEARTBEAT_S, start_timeout_s=START_S, clock=clock)


def check_until(health: WorkerHealth, condition: Callable[[], bool], *, step: int = 5) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, health.beats
        health.check(bus_lost=None, step=step)


def pid_of(health: WorkerHealth, name: str) -> int:
    check_until(health, lambda: name in health.beats and health.beats[name].life == "alive")
    status = health.beats[name].status
    assert status is not None
    return status.pid


def freeze(health: WorkerHealth, clock: Clock, name: str) -> int:
    """Stops a worker, advances the clock while a call is open, and returns its process id."""
    pid = pid_of(health, name)
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while process_state(pid) != "stopped":
        assert time.monotonic() < deadline, process_state(pid)
    health.check(bus_lost=None, step=5)
    clock.now += 2 * HEARTBEAT_S
    return pid


def recorded(health: WorkerHealth) -> list[dict[str, Any]]:
    return health._recoveries.as_records()


def test_a_stopped_worker_is_killed_and_comes_back(services: Services, health: WorkerHealth, clock: Clock) -> None:
    services.start("advantages-0", max_restarts=1)
    first = freeze(health, clock, "advantages-0")
    check_until(health, lambda: bool(recorded(health)))
    assert pid_of(health, "advantages-0") != first
    (recovery,) = recorded(health)
    assert recovery["cause"].startswith("advantages-0 froze (no answer for ")
    assert recovery["cause"].endswith("s, state stopped) and was killed by SIGKILL")
    assert (recovery["tier"], recovery["at_step"], recovery["from_step"]) == (1, 5, 5)
    assert [role.restarts for role in health.roles] == [1]


def test_a_stopped_worker_that_may_not_restart_is_a_loss(
    services: Services, health: WorkerHealth, clock: Clock
) -> None:
    services.start("actor-0", max_restarts=0)
    freeze(health, clock, "actor-0")
    with pytest.raises(ServicesLost, match=r"^actor-0 froze \(no answer for .* killed by SIGKILL$"):
        check_until(health, lambda: False)
    assert recorded(health) == []


def test_a_worker_without_a_first_answer_is_a_loss(
    services: Services, health: WorkerHealth, clock: Clock, tmp_path: Path
) -> None:
    """Responses of other workers do not hide the loss. Pauses of the controller do not count."""
    services.start("actor-0", max_restarts=0)
    pid_of(health, "actor-0")
    services.start("rollout-0", max_restarts=1, gate=tmp_path / "gate")
    clock.now += 100 * START_S
    health.check(bus_lost=None, step=5)
    for _ in range(7):
        clock.now += 1.0
        health.check(bus_lost=None, step=5)
    clock.now += 1.0
    with pytest.raises(ServicesLost, match=r"rollout-0 .*run\.start_timeout_s=10 s"):
        health.check(bus_lost=None, step=5)


def test_a_death_past_the_restarts_is_a_loss(services: Services, health: WorkerHealth) -> None:
    services.start("rollout-0", max_restarts=1)
    first = pid_of(health, "rollout-0")
    kill(first)
    check_until(health, lambda: bool(recorded(health)))
    assert recorded(health)[0]["cause"] == "rollout-0 died"
    second = pid_of(health, "rollout-0")
    assert second != first
    check_until(health, lambda: health.roles[0].restarts == 1)
    kill(second)
    with pytest.raises(ServicesLost, match=r"^rollout-0 died$"):
        check_until(health, lambda: False)
    # Ray may report late that the second death is final. Until this report the death looks like another restart.
    assert {recovery["cause"] for recovery in recorded(health)} == {"rollout-0 died"}


def test_the_restart_of_an_owned_process_is_recorded_with_its_cause(services: Services, health: WorkerHealth) -> None:
    import ray

    services.start("engine-0", max_restarts=1)
    pid_of(health, "engine-0")
    reported = services.workers["engine-0"].set_status.remote(restarts=1, last_restart="was killed by SIGSEGV")
    ray.get(reported, timeout=DEADLINE_S)
    check_until(health, lambda: bool(recorded(health)))
    health.check(bus_lost=None, step=6)
    assert [recovery["cause"] for recovery in recorded(health)] == ["engine-0 was killed by SIGSEGV"]


def test_what_a_lost_worker_owned_is_ended_with_it(services: Services, health: WorkerHealth) -> None:
    """A frozen engine does not notice the exit of its owner, and would block its callers forever."""
    import ray

    services.start("engine-0", max_restarts=1)
    owner = pid_of(health, "engine-0")
    with subprocess.Popen(["sleep", "600"]) as engine:
        try:
            ray.get(services.workers["engine-0"].set_status.remote(child_pids=(engine.pid,)), timeout=DEADLINE_S)
            os.kill(engine.pid, signal.SIGSTOP)
            check_until(health, lambda: health.beats["engine-0"].status.child_pids == (engine.pid,))  # type: ignore[union-attr]
            kill(owner)
            check_until(health, lambda: process_state(engine.pid) in EXITED)
        finally:
            engine.kill()
    check_until(health, lambda: pid_of(health, "engine-0") != owner)


def test_an_own_failure_ends_the_run_at_the_second_look(services: Services, health: WorkerHealth) -> None:
    import ray

    services.start("rollout-0", max_restarts=1)
    pid_of(health, "rollout-0")
    reported = {"state": "failed", "detail": "ValueError: row 3", "error": "Traceback"}
    ray.get(services.workers["rollout-0"].set_status.remote(**reported), timeout=DEADLINE_S)
    check_until(health, lambda: health.roles[0].state == "failed")
    with pytest.raises(RunFailed, match="rollout-0 failed: ValueError: row 3") as failure:
        health.check(bus_lost=None, step=5)
    assert not isinstance(failure.value, ServicesLost)


def test_a_lost_bus_is_reported_at_once(services: Services, health: WorkerHealth) -> None:
    with pytest.raises(ServicesLost, match=r"^the bus died$"):
        health.check(bus_lost="died", step=5)


# -- The states of workers, and what ends an attempt ------------------------------------------------------------------


def status(name: str, state: State = "running", *, since: float = 0.0, **more: Any) -> WorkerStatus:
    reported: dict[str, Any] = {"pid": 1, "error": None} | more
    return WorkerStatus(name=name, state=state, since=since, detail=f"{name}'s words", **reported)


def alive(name: str, state: State = "running", *, silent_s: float = 0.0, **more: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(name=name, life="alive", status=status(name, state, **more), silent_s=silent_s)


def dead(name: str) -> WorkerHeartbeat:
    return WorkerHeartbeat(name=name, life="dead", status=status(name), cause="The actor died\nclass_name: X")


def beats(*given: WorkerHeartbeat) -> dict[str, WorkerHeartbeat]:
    return {beat.name: beat for beat in given}


def judge(
    *given: WorkerHeartbeat, bus: str | None = None, killed: dict[str, str] | None = None, sure: bool = True
) -> Any:
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
    (restarting,) = watch.roles(beats(WorkerHeartbeat(name="rollout-0", life="restarting", status=status("rollout-0"))))
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
    starting = WorkerHeartbeat(name="engine-0", life="starting", status=None)
    restarting = WorkerHeartbeat(name="rollout-0", life="restarting", status=status("rollout-0", "failed"))
    assert judge(alive("actor-0"), alive("advantages-0", "done"), starting, restarting) is None


def test_an_error_outside_of_any_worker_keeps_its_traceback_for_the_logs() -> None:
    try:
        int("x")
    except ValueError as error:
        failure = run_failed("the run did not start", error)
    assert str(failure) == "the run did not start: ValueError: invalid literal for int() with base 10: 'x'"
    assert "Traceback" in failure.log and "Traceback" not in str(failure)


# -- Heartbeats of real Ray actors that are stopped, killed and restarted ---------------------------------------------


class StatusOnly:
    """A worker that only returns its status. Its start waits for the file ``gate``."""

    def __init__(self, gate: Path | None) -> None:
        while gate is not None and not gate.exists():
            time.sleep(0.01)

    def status(self) -> WorkerStatus:
        return WorkerStatus(name="status-0", state="running", since=0.0, pid=os.getpid(), detail="", error=None)


@pytest.fixture
def start(ray_session: str) -> Iterator[Callable[..., Any]]:
    import ray

    started: list[Any] = []

    def start(max_restarts: int, *, gate: Path | None = None) -> Any:
        started.append(ray.remote(StatusOnly).options(num_cpus=0, max_restarts=max_restarts).remote(gate))
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def until(heartbeats: Heartbeats, actor: Any, condition: Callable[[WorkerHeartbeat], bool]) -> WorkerHeartbeat:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(beat := heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"]):
        assert time.monotonic() < deadline, beat
    return beat


def is_alive(beat: WorkerHeartbeat) -> bool:
    return beat.life == "alive" and beat.silent_s == 0.0


def stop(heartbeats: Heartbeats, actor: Any, pid: int) -> None:
    """Stops the worker's process while a call waits for its response."""
    os.kill(pid, signal.SIGSTOP)
    until(heartbeats, actor, lambda beat: process_state(pid) == "stopped" and "status-0" in heartbeats._asked)


def beat_pid(beat: WorkerHeartbeat) -> int:
    assert beat.status is not None
    return beat.status.pid


def test_a_stopped_process_is_silent_and_speaks_again(start: Callable[..., Any]) -> None:
    clock = Clock()
    heartbeats, actor = Heartbeats(clock=clock), start(0)
    pid = beat_pid(until(heartbeats, actor, is_alive))
    try:
        stop(heartbeats, actor, pid)
        for _ in range(3):
            clock.now += 1.0
            silent = heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"]
        assert (silent.life, silent.silent_s) == ("alive", 3.0)
        clock.now += 3600.0  # a pause of this process does not count as silence
        assert heartbeats.poll({"status-0": actor}, timeout_s=0.05)["status-0"].silent_s == 3.0 + LONGEST_GAP_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert beat_pid(until(heartbeats, actor, is_alive)) == pid


def test_a_killed_process_is_dead_or_restarts(start: Callable[..., Any]) -> None:
    heartbeats, actor = Heartbeats(), start(1)
    first = beat_pid(until(heartbeats, actor, is_alive))
    stop(heartbeats, actor, first)  # leaves a call open; the call's failure reports the restart
    os.kill(first, signal.SIGKILL)
    restarting = until(heartbeats, actor, lambda beat: beat.life == "restarting")
    assert beat_pid(restarting) == first
    second = beat_pid(until(heartbeats, actor, is_alive))
    assert second != first
    os.kill(second, signal.SIGKILL)
    dead = until(heartbeats, actor, lambda beat: beat.life == "dead")
    assert dead.cause and beat_pid(dead) == second


def test_a_process_that_has_not_answered_yet_is_starting(start: Callable[..., Any], tmp_path: Path) -> None:
    clock, gate = Clock(), tmp_path / "gate"
    heartbeats, actor = Heartbeats(clock=clock), start(0, gate=gate)
    for passed_s in (0.0, 1.0, 2.0):
        beat = heartbeats.poll({"status-0": actor}, timeout_s=0.0)["status-0"]
        assert (beat.life, beat.silent_s) == ("starting", passed_s)
        clock.now += 1.0
    gate.touch()
    until(heartbeats, actor, is_alive)

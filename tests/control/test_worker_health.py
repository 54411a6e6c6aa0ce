"""The check of the workers on real Ray actors: frozen ones are killed, restarts are recorded, and losses are raised."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.process_trees import EXITED, kill, process_state
from relax_core.control.recoveries import Recoveries, RunFailed, ServicesLost
from relax_core.control.worker_health import WorkerHealth
from relax_core.roles.worker import WorkerStatus, process_host

DEADLINE_S = 120.0
HEARTBEAT_S = 1.0


class Clock:
    """The clock of the heartbeats. Only the test advances it, so that a slow machine freezes no process."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Role:
    """A worker whose status the test sets."""

    def __init__(self, name: str) -> None:
        self.reported: dict[str, Any] = {"name": name, "state": "running", "since": 0.0, "detail": "", "error": None}

    def status(self) -> WorkerStatus:
        return WorkerStatus(pid=os.getpid(), host=process_host(), **self.reported)

    def set_status(self, **reported: Any) -> None:
        self.reported |= reported


class Services:
    """The part of the services that the manager uses."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}

    def handles(self) -> Mapping[str, Any]:
        return self.workers

    def dispensable(self) -> Collection[str]:
        return set()

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        kill(status.pid)

    def start(self, name: str, *, max_restarts: int) -> None:
        import ray

        self.workers[name] = ray.remote(Role).options(num_cpus=0, max_restarts=max_restarts).remote(name)


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
    return WorkerHealth(services, recoveries, heartbeat_timeout_s=HEARTBEAT_S, clock=clock)


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
    # Ray may report late that the second death is final; until then it looks like one more restart.
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
    """A frozen engine does not notice that its owner has exited, and would block its callers without end."""
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

"""The health manager on real Ray actors: what freezes is killed, what dies in place is persisted, what is lost is
told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from relax_core.control.health.worker_health import HealthManager
from relax_core.control.health.worker_states import RunFailed, ServicesLost
from relax_core.control.host.process_trees import GONE, kill, process_state
from relax_core.control.run.recovery_log import Recoveries
from relax_core.roles.process.worker import WorkerStatus, process_host

DEADLINE_S = 120.0
HEARTBEAT_S = 1.0


class Clock:
    """Of the signs of life. The test alone moves it: a slow machine freezes nobody."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Role:
    """A worker that can be told how it is."""

    def __init__(self, name: str) -> None:
        self.told: dict[str, Any] = {"name": name, "state": "running", "since": 0.0, "detail": "", "error": None}

    def status(self) -> WorkerStatus:
        return WorkerStatus(pid=os.getpid(), host=process_host(), **self.told)

    def tell(self, **told: Any) -> None:
        self.told |= told


class Services:
    """What the manager needs of the real ones."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}

    def handles(self) -> Mapping[str, Any]:
        return self.workers

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
def health(services: Services, clock: Clock, tmp_path: Path) -> HealthManager:
    recoveries = Recoveries(tmp_path / "recoveries.json", report=lambda text: None)
    return HealthManager(services, recoveries, heartbeat_timeout_s=HEARTBEAT_S, clock=clock)


def look_until(health: HealthManager, condition: Callable[[], bool], *, step: int = 5) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, health.beats
        health.check(bus_lost=None, step=step)


def pid_of(health: HealthManager, name: str) -> int:
    look_until(health, lambda: name in health.beats and health.beats[name].life == "alive")
    status = health.beats[name].status
    assert status is not None
    return status.pid


def freeze(health: HealthManager, clock: Clock, name: str) -> int:
    """Stops it, and lets time pass behind a question that it cannot answer; its process id."""
    pid = pid_of(health, name)
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while process_state(pid) != "stopped":
        assert time.monotonic() < deadline, process_state(pid)
    health.check(bus_lost=None, step=5)
    clock.now += 2 * HEARTBEAT_S
    return pid


def persisted(health: HealthManager) -> list[dict[str, Any]]:
    return health._recoveries.as_records()


def test_a_stopped_worker_is_killed_and_comes_back(services: Services, health: HealthManager, clock: Clock) -> None:
    services.start("advantages-0", max_restarts=1)
    first = freeze(health, clock, "advantages-0")
    look_until(health, lambda: bool(persisted(health)))
    assert pid_of(health, "advantages-0") != first
    (recovery,) = persisted(health)
    assert recovery["cause"].startswith("advantages-0 froze (no answer for ")
    assert recovery["cause"].endswith("s, state stopped) and was killed by SIGKILL")
    assert (recovery["tier"], recovery["at_step"], recovery["from_step"]) == (1, 5, 5)
    assert [role.restarts for role in health.roles] == [1]


def test_a_stopped_worker_that_may_not_restart_is_a_loss(
    services: Services, health: HealthManager, clock: Clock
) -> None:
    services.start("actor-0", max_restarts=0)
    freeze(health, clock, "actor-0")
    with pytest.raises(ServicesLost, match=r"^actor-0 froze \(no answer for .* killed by SIGKILL$"):
        look_until(health, lambda: False)
    assert persisted(health) == []


def test_a_death_past_the_restarts_is_a_loss(services: Services, health: HealthManager) -> None:
    services.start("rollout-0", max_restarts=1)
    first = pid_of(health, "rollout-0")
    kill(first)
    look_until(health, lambda: bool(persisted(health)))
    assert persisted(health)[0]["cause"] == "rollout-0 died"
    second = pid_of(health, "rollout-0")
    assert second != first
    look_until(health, lambda: health.roles[0].restarts == 1)
    kill(second)
    with pytest.raises(ServicesLost, match=r"^rollout-0 died$"):
        look_until(health, lambda: False)
    # Ray may be slow to tell that the second death is the last one; until then it looks like one more restart.
    assert {recovery["cause"] for recovery in persisted(health)} == {"rollout-0 died"}


def test_a_process_that_a_worker_owns_is_persisted_by_its_own_words(services: Services, health: HealthManager) -> None:
    import ray

    services.start("engine-0", max_restarts=1)
    pid_of(health, "engine-0")
    told = services.workers["engine-0"].tell.remote(restarts=1, last_restart="was killed by SIGSEGV")
    ray.get(told, timeout=DEADLINE_S)
    look_until(health, lambda: bool(persisted(health)))
    health.check(bus_lost=None, step=6)
    assert [recovery["cause"] for recovery in persisted(health)] == ["engine-0 was killed by SIGSEGV"]


def test_what_a_lost_worker_owned_is_ended_with_it(services: Services, health: HealthManager) -> None:
    """An engine that is frozen does not hear that its owner is gone, and would keep its callers for good."""
    import ray

    services.start("engine-0", max_restarts=1)
    owner = pid_of(health, "engine-0")
    with subprocess.Popen(["sleep", "600"]) as engine:
        try:
            ray.get(services.workers["engine-0"].tell.remote(child_pids=(engine.pid,)), timeout=DEADLINE_S)
            os.kill(engine.pid, signal.SIGSTOP)
            look_until(health, lambda: health.beats["engine-0"].status.child_pids == (engine.pid,))  # type: ignore[union-attr]
            kill(owner)
            look_until(health, lambda: process_state(engine.pid) in GONE)
        finally:
            engine.kill()
    look_until(health, lambda: pid_of(health, "engine-0") != owner)


def test_an_own_failure_ends_the_run_at_the_second_look(services: Services, health: HealthManager) -> None:
    import ray

    services.start("rollout-0", max_restarts=1)
    pid_of(health, "rollout-0")
    told = {"state": "failed", "detail": "ValueError: row 3", "error": "Traceback"}
    ray.get(services.workers["rollout-0"].tell.remote(**told), timeout=DEADLINE_S)
    look_until(health, lambda: health.roles[0].state == "failed")
    with pytest.raises(RunFailed, match="rollout-0 failed: ValueError: row 3") as failure:
        health.check(bus_lost=None, step=5)
    assert not isinstance(failure.value, ServicesLost)


def test_a_lost_bus_is_told_at_once(services: Services, health: HealthManager) -> None:
    with pytest.raises(ServicesLost, match=r"^the bus died$"):
        health.check(bus_lost="died", step=5)

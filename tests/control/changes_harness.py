"""Helpers for tests of engine changes: Ray actors as fake owners and rollout workers, and the real health check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from relax_core.contracts.engine import WeightManifest
from relax_core.control.engine_changes import EngineChanges
from relax_core.control.engine_set import EngineSet
from relax_core.control.recoveries import Recoveries
from relax_core.control.worker_health import WorkerHealth
from relax_core.roles.worker import EngineReport, WorkerStatus, process_host
from relax_core.weights.engine_members import MemberList
from relax_core.weights.version_folder import LATEST, VersionFolder

DEADLINE_S = 120.0


@ray.remote(num_cpus=0, max_concurrency=8)
class Owner:
    """A fake engine owner. The test sets the version that its engine serves."""

    def __init__(self, name: str) -> None:
        self._told: dict[str, Any] = {"name": name, "state": "running", "since": 0.0, "detail": "", "error": None}

    def tell(self, **told: Any) -> None:
        self._told |= told

    def status(self) -> WorkerStatus:
        return WorkerStatus(pid=os.getpid(), host=process_host(), **self._told)

    def request_stop(self) -> None:
        self._told["state"] = "done"

    def join(self, timeout_s: float) -> bool:
        return True


@ray.remote(num_cpus=0)
class Rollout:
    """A fake rollout worker. The test sets the number of its open samples in an engine."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def owe(self, samples: int) -> None:
        self._samples = samples

    def open_samples(self, engine: int) -> int:
        return self._samples


class Services:
    """Fake services for engine changes and the health check."""

    def __init__(self) -> None:
        self.owners: dict[str, Any] = {"engine-0": Owner.remote("engine-0")}  # type: ignore[attr-defined]
        self.rollouts = [Rollout.remote(0), Rollout.remote(3)]  # type: ignore[attr-defined]
        self.removed: list[int] = []

    def handles(self) -> Mapping[str, Any]:
        return self.owners

    def dispensable(self) -> Collection[str]:
        return self.owners.keys() - {"engine-0"}

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        raise AssertionError(name)

    def start_engine(self, number: int) -> None:
        self.owners[f"engine-{number}"] = Owner.remote(f"engine-{number}")  # type: ignore[attr-defined]

    def stop_engine(self, number: int, *, timeout_s: float) -> Any:
        self.owners[f"engine-{number}"].request_stop.remote()
        return self.owners[f"engine-{number}"].join.remote(timeout_s)

    def remove_engine(self, number: int) -> None:
        ray.kill(self.owners.pop(f"engine-{number}"))
        self.removed.append(number)

    def open_samples(self, number: int) -> list[Any]:
        return [worker.open_samples.remote(number) for worker in self.rollouts]


class Run:
    """Holds the engine changes of an attempt and the services. The test advances the clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self.difference = 0.0, ""
        self.compares = True  # False: comparisons never finish
        self.compared: list[tuple[str, str]] = []
        self.attached: list[bool] = []
        self.services, self.engines = Services(), EngineSet(1)
        self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Kills the engine owners and begins an attempt with the current engines."""
        for name in self.services.dispensable():
            ray.kill(self.services.owners.pop(name))
        folder.mkdir(exist_ok=True)
        self.engines.begin(folder)
        self.members = MemberList(folder, count=1)
        self.versions = VersionFolder(folder)
        recoveries = Recoveries(folder / "recoveries.json", report=lambda text: None)
        self.health = WorkerHealth(self.services, recoveries, heartbeat_timeout_s=600.0, start_timeout_s=600.0)
        for number in self.engines.added("joining"):
            self.services.start_engine(number)
        self.changes = EngineChanges(
            self.engines,
            self.services,
            folder=folder,
            join_timeout_s=60.0,
            drain_timeout_s=30.0,
            probe=self,
            clock=lambda: self.now,
        )

    def publish(self, version: int) -> None:
        manifest = WeightManifest(
            version=version, path="", data_offset=0, total_bytes=0, bucket_bytes=1, digests=[], digest="", tensors=[]
        )
        self.versions.replace(LATEST, manifest)

    def start(self, url: str, *, attached: bool, reference: str) -> Future[str]:
        """Fakes the probe. The test sets the result, which is available at once."""
        self.compared.append((url, reference))
        self.attached.append(attached)
        found: Future[str] = Future()
        if self.compares:
            found.set_result(self.difference)
        return found

    def join(self) -> int:
        (number,) = self.engines.reserve(1)
        self.changes.join(number)
        return number

    def tell(self, number: int, **told: Any) -> None:
        ray.get(self.services.owners[f"engine-{number}"].tell.remote(**told))

    def tick_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.tick()

    def tick(self) -> None:
        self.health.check(bus_lost=None, step=1)
        self.changes.tick(self.health.beats, ended=self.health.ended)

    def states(self) -> dict[int, str]:
        return {member.number: member.state for member in self.members.read().members}


@pytest.fixture
def run(ray_session: str, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for actor in [*run.services.owners.values(), *run.services.rollouts]:
        ray.kill(actor)


def joined(run: Run) -> int:
    """Returns an added engine that serves."""
    run.publish(4)
    run.tell(0, engine=EngineReport(url="http://h:0", version=4))
    number = run.join()
    run.tell(number, engine=EngineReport(url="http://h:1", version=4))
    run.tick_until("it does not serve", lambda: run.states()[number] == "serving")
    return number

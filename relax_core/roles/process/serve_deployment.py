"""A role's face in Ray Serve: health and control. The work is in plain actors beside it, and outlives it."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from relax_core.roles.process.worker import WorkerStatus

ANSWER_S = 10.0  # a worker answers in milliseconds, also while it trains


@serve.deployment(
    ray_actor_options={"num_cpus": 0.01}, health_check_period_s=5, health_check_timeout_s=30, max_ongoing_requests=16
)
class RoleDeployment:
    """Finds the workers of a role by name, when it is asked: Serve restarts a front that dies, whatever has become of
    its workers, and they never notice."""

    def __init__(self, role: str, workers: list[str], namespace: str) -> None:
        self.role = role
        self._names = workers
        self._namespace = namespace

    async def status(self) -> list[WorkerStatus]:
        """One status a worker; raises RayActorError for a worker whose process is gone for good, ValueError where
        there is none of its name any more, and TimeoutError for one that does not answer."""
        async with asyncio.timeout(ANSWER_S):
            return list(await asyncio.gather(*(worker.status.remote() for worker in self._workers())))

    async def request_stop(self) -> None:
        """Asks every worker to end at its next safe place. Raises as `status` does."""
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*(worker.request_stop.remote() for worker in self._workers()))

    def _workers(self) -> list[Any]:
        return [ray.get_actor(name, namespace=self._namespace) for name in self._names]

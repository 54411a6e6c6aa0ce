"""The Serve deployment of a role: status and stop. The workers are plain Ray actors and outlive it."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from relax_core.roles.worker import WorkerStatus

ANSWER_S = 10.0  # a worker answers in milliseconds, even while it trains


@serve.deployment(
    ray_actor_options={"num_cpus": 0.01}, health_check_period_s=5, health_check_timeout_s=30, max_ongoing_requests=16
)
class RoleDeployment:
    """Answers for the workers of a role, which it finds by name on each call.

    Serve restarts a deployment that dies, whatever state its workers are in; the workers do not notice.
    """

    def __init__(self, role: str, workers: list[str], namespace: str) -> None:
        self.role = role
        self._names = workers
        self._namespace = namespace

    async def status(self) -> list[WorkerStatus]:
        """Returns one status per worker.

        Raises RayActorError for a worker that has exited for good, ValueError if no worker of that name exists, and
        TimeoutError for a worker that does not answer.
        """
        async with asyncio.timeout(ANSWER_S):
            return list(await asyncio.gather(*(worker.status.remote() for worker in self._workers())))

    async def request_stop(self) -> None:
        """Asks every worker to stop at its next safe point; raises as `status` does."""
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*(worker.request_stop.remote() for worker in self._workers()))

    def _workers(self) -> list[Any]:
        return [ray.get_actor(name, namespace=self._namespace) for name in self._names]

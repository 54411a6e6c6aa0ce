"""A role's face in Ray Serve: health and control. The work is in plain actors beside it, and outlives it."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from relax_core.roles.worker import WorkerStatus


@serve.deployment(
    ray_actor_options={"num_cpus": 0.01}, health_check_period_s=5, health_check_timeout_s=30, max_ongoing_requests=16
)
class RoleFront:
    """Adopts the workers of a role by name. A front that dies is restarted by Serve; its workers never notice."""

    def __init__(self, role: str, workers: list[str], namespace: str) -> None:
        self.role = role
        self._workers: list[Any] = [ray.get_actor(name, namespace=namespace) for name in workers]

    async def status(self) -> list[WorkerStatus]:
        """One status a worker; raises RayActorError for a worker whose process is gone for good."""
        return list(await asyncio.gather(*(worker.status.remote() for worker in self._workers)))

    async def request_stop(self) -> None:
        """Asks every worker to end at its next safe place."""
        await asyncio.gather(*(worker.request_stop.remote() for worker in self._workers))

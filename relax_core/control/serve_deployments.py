"""Deploys the roles in Ray Serve (``run.serve``), so programs can read the roles' status or stop the roles.

The workers are plain Ray actors and outlive the deployments. No train step waits for Ray Serve. Ray restarts Serve's
controller and the deployments.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from relax_core.contracts.monitor import Finding
from relax_core.roles.failure import failure_line
from relax_core.roles.process_placement import roles_of
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.worker import WorkerStatus

DEPLOY_TRIES = 3  # number of attempts, because Serve's controller may die during a deployment
TRY_S = 1.0
ANSWER_S = 10.0  # timeout in seconds; a worker answers in milliseconds, even while it trains


@serve.deployment(
    ray_actor_options={"num_cpus": 0.01}, health_check_period_s=5, health_check_timeout_s=30, max_ongoing_requests=16
)
class RoleDeployment:
    """Passes calls on to the workers of a role. It finds the workers by name on each call.

    Serve restarts a dead deployment in any state of the workers. The workers are not affected.
    """

    def __init__(self, role: str, workers: list[str], namespace: str) -> None:
        self.role = role
        self._names = workers
        self._namespace = namespace

    async def status(self) -> list[WorkerStatus]:
        """Returns one status per worker.

        Raises RayActorError for a worker that has exited permanently, ValueError if no worker with the name exists, and
        TimeoutError for a worker that does not answer.
        """
        async with asyncio.timeout(ANSWER_S):
            return list(await asyncio.gather(*(worker.status.remote() for worker in self._workers())))

    async def request_stop(self) -> None:
        """Asks every worker to stop at its next safe point. Raises as `status` does."""
        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*(worker.request_stop.remote() for worker in self._workers()))

    def _workers(self) -> list[Any]:
        return [ray.get_actor(name, namespace=self._namespace) for name in self._names]


class ServeDeployments:
    """Deploys one Serve app per role. After a recovery, deploys the app again for the new workers."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._roles = roles_of(context.config)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="serve_deployments")
        self._namespace = ""
        self._deployed: Future[None] | None = None

    def follow(self, namespace: str) -> None:
        """Starts the deployment of the apps for the workers of ``namespace``, if not done before. Returns at once."""
        if namespace != self._namespace:
            self._namespace = namespace
            self._deployed = self._pool.submit(self._deploy, namespace)

    def look(self) -> Finding | None:
        """Returns a finding if a deployment has failed."""
        deployed = self._deployed
        if deployed is None or not deployed.done() or (error := deployed.exception(timeout=0)) is None:
            return None
        return Finding(failed_part="Ray Serve", how=f"did not start the roles' deployments: {failure_line(error)}")

    def close(self, *, timeout_s: float) -> None:
        """Deletes the run's apps in an external Ray cluster. In a Ray that the run started, Serve ends with Ray.

        If a deployment does not finish within ``timeout_s`` seconds, this is reported, and the run still ends.
        """
        self._pool.shutdown(wait=False)
        if self._deployed is None:
            return
        try:
            failed = self._deployed.exception(timeout=timeout_s)
        except TimeoutError:
            print(f"relax: Ray Serve has not deployed the roles within {timeout_s:g} s", file=sys.stderr)
            return
        if failed is None and self._context.config.launcher.ray_address is not None:
            for role in self._roles:
                serve.delete(self._app(role))

    def _deploy(self, namespace: str) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for left in reversed(range(DEPLOY_TRIES)):
            try:
                serve.start(proxy_location="Disabled")
                serve.run_many([self._target(role, count, namespace) for role, count in self._roles.items()])
                return
            except RayError:
                if not left:
                    raise
                time.sleep(TRY_S)

    def _target(self, role: str, count: int, namespace: str) -> Any:
        names = [worker_name(role, rank) for rank in range(count)]
        deployment = RoleDeployment.bind(role, names, namespace)  # type: ignore[attr-defined]
        return serve.RunTarget(deployment, name=self._app(role), route_prefix=None)

    def _app(self, role: str) -> str:
        return f"{self._context.run_namespace}-{role}"

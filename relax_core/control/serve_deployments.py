"""Deploys the roles in Ray Serve.

The deployments stand beside the workers, and no train step waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from ray.exceptions import RayError

from relax_core.control.recoveries import IN_PLACE, Recoveries
from relax_core.control.serve_watch import ServeLost, ServeWatch
from relax_core.roles.process_placement import roles_of
from relax_core.roles.role_context import RunContext, worker_name

DEPLOY_TRIES = 3  # Serve's controller may die during a deployment
TRY_S = 1.0


class ServeDeployments:
    """Deploys one Serve app a role and, after a recovery, deploys it again for the new workers.

    Without ``run.serve`` there is no deployment and Serve does not start. Each restart of Serve's controller is
    recorded in ``recoveries``. ``ray_lost`` is called if Ray does not restart it.
    """

    def __init__(self, context: RunContext, *, recoveries: Recoveries, ray_lost: Callable[[str], NoReturn]) -> None:
        config = context.config
        self._context = context
        self._recoveries = recoveries
        self._ray_lost = ray_lost
        self._watch: ServeWatch | None = None
        self._roles = roles_of(config)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="serve_deployments")
        self._namespace = ""
        self._deployed: Future[None] | None = None

    def follow(self, namespace: str) -> None:
        """Deploys the apps for the workers of ``namespace``, unless that is done already. Returns at once."""
        if self._context.config.run.serve and namespace != self._namespace:
            self._namespace = namespace
            self._deployed = self._pool.submit(self._deploy, namespace)

    def check(self, *, step: int) -> None:
        """Checks Serve's controller, except in a joined cluster, which other users share.

        ``step`` is the number of train steps done.
        """
        run = self._context.config.run
        if self._context.config.launcher.ray_address is not None or self._deployed is None:
            return
        if self._watch is None and self._deployed.done() and self.error() is None:
            self._watch = ServeWatch(frozen_after_s=run.heartbeat_timeout_s)
        if self._watch is None:
            return
        try:
            how = self._watch.check()
        except ServeLost as lost:
            self._ray_lost(str(lost))
        if how is not None:
            self._recoveries.begin(IN_PLACE, f"Serve's controller {how}", at_step=step, from_step=step)
        if self._watch.restarts > run.max_restarts:
            self._ray_lost(f"Serve's controller ended more than run.max_restarts={run.max_restarts} times")

    def error(self) -> BaseException | None:
        """Returns why the deployment failed, or None if it succeeded or goes on."""
        return self._deployed.exception() if self._deployed is not None and self._deployed.done() else None

    def close(self, *, timeout_s: float) -> None:
        """Deletes the run's apps in a joined cluster.

        Serve in the run's own Ray ends with Ray a moment later.

        Raises TimeoutError if a deployment does not end within ``timeout_s`` seconds.
        """
        started = self._deployed is not None and self._deployed.exception(timeout=timeout_s) is None
        if started and self._context.config.launcher.ray_address is not None:
            from ray import serve

            for role in self._roles:
                serve.delete(self._app(role))
        self._pool.shutdown(wait=True)

    def _deploy(self, namespace: str) -> None:
        for left in reversed(range(DEPLOY_TRIES)):
            try:
                self._deploy_once(namespace)
                return
            except RayError:
                if not left:
                    raise
                time.sleep(TRY_S)

    def _deploy_once(self, namespace: str) -> None:
        from ray import serve

        from relax_core.roles.serve_deployment import RoleDeployment

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        targets = []
        for role, count in self._roles.items():
            names = [worker_name(role, rank) for rank in range(count)]
            deployment = RoleDeployment.bind(role, names, namespace)  # type: ignore[attr-defined]
            targets.append(serve.RunTarget(deployment, name=self._app(role), route_prefix=None))
        serve.run_many(targets)

    def _app(self, role: str) -> str:
        return f"{self._context.run_namespace}-{role}"

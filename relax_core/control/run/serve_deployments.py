"""The roles' faces in Ray Serve, beside the workers: nothing of a step waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from ray.exceptions import RayError

from relax_core.control.health.serve_watch import ServeLost, ServeWatch
from relax_core.control.run.recovery_log import IN_PLACE, Recoveries
from relax_core.control.run.role_counts import roles_of
from relax_core.roles.process.role_context import RunContext, worker_name

DEPLOY_TRIES = 3  # Serve's controller may die in the middle of one
TRY_S = 1.0


class ServeDeployments:
    """One Serve app a role, from the run's start to its end; they are pointed at new workers by a new deployment.
    Without ``run.serve`` there is none, and Serve does not start.

    ``book`` gets each new start of Serve's controller in place. ``ray_lost`` is called where there is none.
    """

    def __init__(self, context: RunContext, *, book: Recoveries, ray_lost: Callable[[str], NoReturn]) -> None:
        config = context.config
        self._context = context
        self._book = book
        self._ray_lost = ray_lost
        self._watch: ServeWatch | None = None
        self._roles = roles_of(config)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="serve_deployments")
        self._namespace = ""
        self._deployed: Future[None] | None = None

    def follow(self, namespace: str) -> None:
        """Points them at the workers of ``namespace``, where they do not already; returns at once."""
        if self._context.config.run.serve and namespace != self._namespace:
            self._namespace = namespace
            self._deployed = self._pool.submit(self._deploy, namespace)

    def look(self, *, step: int) -> None:
        """Looks after the controller of a Serve of our own; that of a joined cluster is others' too. ``step``: train
        steps done."""
        run = self._context.config.run
        if self._context.config.launcher.ray_address is not None or self._deployed is None:
            return
        if self._watch is None and self._deployed.done() and self.error() is None:
            self._watch = ServeWatch(frozen_after_s=run.heartbeat_timeout_s)
        if self._watch is None:
            return
        try:
            how = self._watch.look()
        except ServeLost as lost:
            self._ray_lost(str(lost))
        if how is not None:
            self._book.begin(IN_PLACE, f"Serve's controller {how}", at_step=step, from_step=step)
        if self._watch.restarts > run.max_restarts:
            self._ray_lost(f"Serve's controller ended more than run.max_restarts={run.max_restarts} times")

    def error(self) -> BaseException | None:
        """Why Serve did not start them; None where it did, or is still at it."""
        return self._deployed.exception() if self._deployed is not None and self._deployed.done() else None

    def close(self, *, timeout_s: float) -> None:
        """On a joined cluster our apps end; a cluster of our own ends with Ray a moment later. Raises TimeoutError
        where Serve is still not done."""
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

        from relax_core.roles.process.serve_deployment import RoleDeployment

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

"""The run's services: which roles an algorithm needs, their processes, their faces in Serve, their end."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from relax_core.bus.factory import create_bus
from relax_core.bus.ray_backend import RayBus
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Needs
from relax_core.contracts.bus import BusLost
from relax_core.observe.metrics_actor import MetricsClient, start_metrics
from relax_core.registry import find_algorithm
from relax_core.roles.actor import ActorWorker
from relax_core.roles.advantages import AdvantagesWorker
from relax_core.roles.context import BUS, METRICS, RunContext, worker_name
from relax_core.roles.engine_host import EngineHost
from relax_core.roles.forward import ForwardWorker
from relax_core.roles.rollout import RolloutWorker
from relax_core.roles.worker import WorkerStatus

STATUS_TIMEOUT_S = 10.0
WORKER_CALLS = 8  # calls that a worker answers beside its loop: status, stop, endpoint, waits

WORKERS: dict[str, Any] = {
    "engine": EngineHost,
    "actor": ActorWorker,
    "rollout": RolloutWorker,
    "advantages": AdvantagesWorker,
    "actor_fwd": partial(ForwardWorker, task="actor_fwd", column=c.OLD_LOGPROBS, follow=True),
    "reference": partial(ForwardWorker, task="reference", column=c.REFERENCE_LOGPROBS, follow=False),
}
RESTARTED_IN_PLACE = ("engine", "rollout", "advantages", "actor_fwd", "reference")


def roles_of(needs: Needs, *, engines: int) -> dict[str, int]:
    """Role → how many workers it has, in the order in which they are started: the slowest to start first."""
    roles = {"actor": 1, "engine": engines, "rollout": 1}
    if needs.old_logprobs == "actor_fwd":
        roles["actor_fwd"] = 1
    if needs.reference:
        roles["reference"] = 1
    roles["advantages"] = 1
    return roles


class Services:
    """Starts everything at the same time; the workers find each other. Raises what the bus or the metrics raise."""

    def __init__(self, context: RunContext, snapshot: bytes | None) -> None:
        config = context.config
        self._context = context
        self._roles = roles_of(find_algorithm(config.algo.name).needs(config.algo), engines=config.engine.count)
        self._pool = ThreadPoolExecutor(max_workers=3, thread_name_prefix="services")
        with ExitStack() as on_failure:
            on_failure.callback(self._pool.shutdown)  # a call under way would wait for a Ray that is gone
            bus = self._pool.submit(self._create_bus, snapshot)
            metrics = self._pool.submit(self._create_metrics)
            self.workers = {
                worker_name(role, rank): self._start(role, rank)
                for role, count in self._roles.items()
                for rank in range(count)
            }
            self.bus: RayBus = bus.result(timeout=config.run.start_timeout_s)
            self.metrics: MetricsClient = metrics.result(timeout=config.run.start_timeout_s)
            on_failure.pop_all()
        self.fronts: Future[None] = self._pool.submit(self._deploy_fronts)

    def _create_bus(self, snapshot: bytes | None) -> RayBus:
        config = self._context.config
        bus = create_bus(
            config.bus,
            groups_per_step=config.rollout.prompts_per_step,
            group_size=config.algo.group_size,
            max_staleness=config.mode.max_staleness,
            on_stale=config.mode.on_stale.value,
            total_steps=config.run.steps,
            ledger_path=self._context.run_dir / "ledger.sqlite",
            name=BUS,
            namespace=self._context.namespace,
        )
        if snapshot is not None:
            bus.restore(snapshot, timeout_s=config.bus.call_timeout_s)
        return bus

    def _create_metrics(self) -> MetricsClient:
        context = self._context
        client = start_metrics(
            context.config.tracker,
            context.run_dir,
            name=METRICS,
            namespace=context.namespace,
            max_restarts=context.config.run.max_restarts,
        )
        if context.start_step:
            client.mark_resume(context.start_step)
        return client

    def _start(self, role: str, rank: int) -> Any:
        name = worker_name(role, rank)
        factory = WORKERS[role]
        extra = factory.keywords if isinstance(factory, partial) else {}
        worker = factory.func if isinstance(factory, partial) else factory
        return (
            ray.remote(worker)
            .options(
                name=name,
                namespace=self._context.namespace,
                num_cpus=0,
                max_concurrency=WORKER_CALLS,
                max_restarts=self._context.config.run.max_restarts if role in RESTARTED_IN_PLACE else 0,
            )
            .remote(name, self._context, rank, **extra)
        )

    def _deploy_fronts(self) -> None:
        """One Serve app a role, beside the running workers: nothing of a step waits for it."""
        from ray import serve

        from relax_core.roles.front import RoleFront

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        targets = []
        for role, count in self._roles.items():
            names = [worker_name(role, rank) for rank in range(count)]
            front = RoleFront.bind(role, names, self._context.namespace)  # type: ignore[attr-defined]
            targets.append(serve.RunTarget(front, name=self._app(role), route_prefix=None))
        serve.run_many(targets)

    def statuses(self) -> dict[str, WorkerStatus | str]:
        """Every worker's status, or in words why it gave none: "restarting" or "dead: …"."""
        asked = {name: worker.status.remote() for name, worker in self.workers.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=STATUS_TIMEOUT_S)
        return {name: _answer(reference) for name, reference in asked.items()}

    def request_stop(self) -> None:
        """Asks the trainer to end after the step under way, with a checkpoint."""
        self.workers[worker_name("actor", 0)].request_stop.remote()

    def wait_evaluated(self, timeout_s: float) -> bool:
        """Waits for the last evaluation; False where it is not in, or the role restarts."""
        rollout = self.workers[worker_name("rollout", 0)]
        try:
            return bool(ray.get(rollout.wait_evaluated.remote(timeout_s), timeout=timeout_s + 5.0))
        except (GetTimeoutError, ActorDiedError, ActorUnavailableError):
            return False

    def close(self, reason: str) -> None:
        """Ends every process of the run: the bus first, so that nobody waits; then the engines by their owners."""
        timeout_s = self._context.config.run.stop_timeout_s
        with suppress(BusLost):  # nobody waits on a bus that is gone
            self.bus.close(reason=reason, timeout_s=timeout_s)
        for worker in self.workers.values():
            worker.request_stop.remote()
        ends = [worker.join.remote(timeout_s / 2) for worker in self.workers.values()]
        ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        for worker in self.workers.values():
            ray.kill(worker)
        self._end_fronts(timeout_s)
        self.bus.terminate()
        self._pool.shutdown(wait=True)

    def _app(self, role: str) -> str:
        return f"{self._context.namespace}-{role}"

    def _end_fronts(self, timeout_s: float) -> None:
        """On a joined cluster only our apps end; a cluster of our own ends with Ray a moment later."""
        failed = self.fronts.exception(timeout=timeout_s)
        if failed is None and self._context.config.launcher.ray_address is not None:
            from ray import serve

            for role in self._roles:
                serve.delete(self._app(role))


def _answer(reference: Any) -> WorkerStatus | str:
    try:
        status: WorkerStatus = ray.get(reference, timeout=0)
    except GetTimeoutError:
        return "silent"
    except ActorUnavailableError:
        return "restarting"
    except ActorDiedError as error:
        return f"dead: {error}"
    return status

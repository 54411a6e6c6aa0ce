"""Starts and ends the services of a run: the bus and the workers of the roles that the algorithm needs."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from relax_core.bus.factory import create_bus
from relax_core.bus.ray_bus import RayBus, blocking
from relax_core.bus.settings import BusSettings
from relax_core.config.engine_checks import offline_rows
from relax_core.contracts.bus import BusLost, BusTimeout
from relax_core.contracts.process_trees import kill, kill_trees
from relax_core.control.engine_set import EngineSet
from relax_core.roles.attached_engine import AttachedEngineOwner
from relax_core.roles.engine_owner import EngineOwner
from relax_core.roles.feeder_worker import FeederWorker
from relax_core.roles.judge_engine import JudgeEngineOwner
from relax_core.roles.process_placement import ROLLOUT, node_options, rank_options, reserve_ranks, roles_of, worker_gpus
from relax_core.roles.role_context import BUS, ENGINE, JUDGE_ENGINE, TEACHER_ENGINE, RunContext, worker_name
from relax_core.roles.rollout_worker import RolloutWorker
from relax_core.roles.trainer.column_worker import AdvantagesWorker
from relax_core.roles.trainer.critic_trainer import CriticTrainer
from relax_core.roles.trainer.policy_trainer import PolicyTrainer
from relax_core.roles.trainer.rank_worker import STATUS_GROUPS, ActorFwdRank, ActorRank, RankWorker, ReferenceRank
from relax_core.roles.trainer.reference_logprobs import ActorFwdWorker, ReferenceWorker
from relax_core.roles.trainer.teacher_worker import TeacherEngineOwner, TeacherWorker
from relax_core.roles.worker import WorkerStatus, process_host

WORKER_CALLS = 8  # concurrent calls that a worker answers while its loop runs: status, stop, endpoint, waits

CREATED_S = 30.0  # seconds after the start timeout in which the calls that create the bus reach their own timeouts

WORKERS: dict[str, Any] = {
    "engine": EngineOwner,
    "actor": PolicyTrainer,
    "rollout": RolloutWorker,
    "advantages": AdvantagesWorker,
    "critic": CriticTrainer,
    "actor_fwd": ActorFwdWorker,
    "reference": ReferenceWorker,
    "teacher": TeacherWorker,
    TEACHER_ENGINE: TeacherEngineOwner,
    JUDGE_ENGINE: JudgeEngineOwner,
}
# The classes of ranks above 0, for roles with several processes.
OTHER_RANKS: dict[str, type[RankWorker]] = {"actor": ActorRank, "actor_fwd": ActorFwdRank, "reference": ReferenceRank}
AFTER_RESTORE = ("rollout",)  # roles that request admissions, so they start after the bus has restored its checkpoint
RESTARTED_IN_PLACE = (
    "engine",
    "rollout",
    "advantages",
    "actor_fwd",
    "reference",
    "teacher",
    TEACHER_ENGINE,
    JUDGE_ENGINE,
)


class Services:
    """Starts and holds the bus and the workers of one attempt. They start at the same time and discover each other.

    ``engines`` are the engines at the start of the attempt. Raises the errors of the bus's start.
    """

    def __init__(
        self,
        context: RunContext,
        snapshot: bytes | None,
        *,
        engines: EngineSet,
    ) -> None:
        config = context.config
        self._context = context
        self._engines = engines
        self.roles = roles_of(config)
        self._feeds = offline_rows(config) is not None
        self._statuses: dict[str, WorkerStatus] = {}
        self.workers: dict[str, Any] = {}
        self._reserved: dict[str, PlacementGroup] = {}
        ends = time.monotonic() + config.run.start_timeout_s
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="bus-start") as pool, ExitStack() as on_failure:
            on_failure.callback(self._abandon)
            bus = pool.submit(self._create_bus, snapshot, ends=ends)
            self._start_roles(role for role in self.roles if role not in AFTER_RESTORE)
            self.bus: RayBus = self._started(bus, ends=ends)
            self._start_roles(role for role in self.roles if role in AFTER_RESTORE)
            self.bus_pid = self.bus.process_id(timeout_s=_left_s(ends))
            on_failure.pop_all()

    def _started(self, bus: Future[RayBus], *, ends: float) -> RayBus:
        try:
            return bus.result(timeout=_left_s(ends) + CREATED_S)
        except TimeoutError as error:
            limit_s, why = self._context.config.run.start_timeout_s, str(error) or "it is still starting"
            raise BusTimeout(f"the bus did not start within run.start_timeout_s={limit_s:g} s: {why}") from error

    def _start_roles(self, roles: Iterable[str]) -> None:
        for role in roles:
            if role in OTHER_RANKS and self.roles[role] > 1:
                config = self._context.config
                self._reserved[role] = reserve_ranks(config.launcher, config.placement, self.roles[role])
            ranks = [member.number for member in self._engines.members()] if role == ENGINE else range(self.roles[role])
            for rank in ranks:
                self.workers[worker_name(role, rank)] = self._start(role, rank)

    def _create_bus(self, snapshot: bytes | None, *, ends: float) -> RayBus:
        config = self._context.config
        by_node = config.launcher.ray_address is not None
        if self._context.media_folder is not None and not by_node:
            self._context.media_folder.mkdir(mode=0o700, parents=True)
        bus = create_bus(
            config.bus,
            BusSettings.of(config, media_folder=self._context.media_folder, media_nodes=by_node),
            ledger_path=self._context.run_dir / "ledger.sqlite",
            name=BUS,
            namespace=self._context.namespace,
            socket_folder=self._context.token_file.parent,
            node_options=node_options(config.launcher, BUS, 0),
            timeout_s=_left_s(ends),
        )
        if snapshot is not None:
            blocking(bus.restore(snapshot, timeout_s=_left_s(ends)))
        return bus

    def _start(self, role: str, rank: int) -> Any:
        name = worker_name(role, rank)
        # Ray's type annotations lack concurrency groups.
        other_rank: dict[str, Any] = {"concurrency_groups": STATUS_GROUPS, "num_cpus": 0}
        attached = self._is_attached(role, rank)
        worker = AttachedEngineOwner if attached else WORKERS[role]
        if role == ROLLOUT and self._feeds:
            worker = FeederWorker
        remote: Any = (
            ray.remote(**other_rank)(OTHER_RANKS[role]) if role in OTHER_RANKS and rank else ray.remote(worker)
        )
        if role in self._reserved:
            options = rank_options(self._context.config.placement, self._reserved[role], rank)
        else:
            gpus = 0 if attached else worker_gpus(self._context.config, role)
            options = node_options(self._context.config.launcher, role, rank, gpus=gpus)
        if not (role in OTHER_RANKS and rank):
            options["max_concurrency"] = WORKER_CALLS
        return remote.options(
            name=name,
            namespace=self._context.namespace,
            max_restarts=self._context.config.run.max_restarts if role in RESTARTED_IN_PLACE else 0,
            **options,
        ).remote(name, self._context, rank)

    def _is_attached(self, role: str, rank: int) -> bool:
        """Returns whether a worker owns an external engine."""
        return role == ENGINE and bool(self._context.config.engine.urls or self._engines.url_of(rank))

    def handles(self) -> Mapping[str, Any]:
        """Returns the Ray handles of all workers, by worker name."""
        return self.workers

    def start_engine(self, number: int) -> None:
        """Starts the owner of an engine while the services run."""
        self.workers[worker_name(ENGINE, number)] = self._start(ENGINE, number)

    def stop_engine(self, number: int, *, timeout_s: float) -> Any:
        """Asks an engine owner to end its engine and itself. Returns the Ray reference of the answer."""
        owner = self.workers[worker_name(ENGINE, number)]
        owner.request_stop.remote()
        return owner.join.remote(timeout_s)

    def remove_engine(self, number: int) -> None:
        """Kills the remaining processes of an engine on this machine and forgets the engine."""
        name = worker_name(ENGINE, number)
        ray.kill(self.workers.pop(name))
        status = self._statuses.pop(name, None)
        if status is not None and status.host == process_host():
            kill_trees((status.pid, *status.child_pids))

    def open_samples(self, number: int) -> list[Any]:
        """Asks each rollout worker for its number of open samples on an engine.

        Returns Ray references of the numbers.
        """
        rollouts = [self.workers[worker_name("rollout", rank)] for rank in range(self.roles["rollout"])]
        return [worker.open_samples.remote(number) for worker in rollouts]

    def dispensable(self) -> Collection[str]:
        """Returns the owners of added engines, and the owners of removed engines that are still ending."""
        needed = {worker_name(ENGINE, number) for number in range(self.roles.get(ENGINE, 0))}
        return {name for name in self.workers if name.rpartition("-")[0] == ENGINE} - needed

    def record_statuses(self, statuses: Mapping[str, WorkerStatus]) -> None:
        """Records the process ids of the workers, which `kill` needs."""
        self._statuses |= {name: status for name, status in statuses.items() if name in self.workers}

    def request_stop(self) -> None:
        """Asks the trainer to end after the current step, with a checkpoint."""
        self.workers[worker_name("actor", 0)].request_stop.remote()

    def wait_evaluated(self, timeout_s: float) -> bool:
        """Waits for the last evaluation. Returns False if it has not ended or the role is restarting."""
        rollout = self.workers[worker_name("rollout", 0)]
        try:
            return bool(ray.get(rollout.wait_evaluated.remote(timeout_s), timeout=timeout_s + 5.0))
        except (GetTimeoutError, ActorDiedError, ActorUnavailableError):
            return False

    def kill_frozen(self, name: str, status: WorkerStatus) -> None:
        """Kills a worker that does not answer.

        Ray restarts the worker if ``max_restarts`` allows it. A worker on another host is killed through Ray, which
        takes seconds for a stopped process.
        """
        if status.host == process_host():
            kill(status.pid)
        else:
            ray.kill(self.handles()[name], no_restart=False)

    def close_immediately(self, reason: str) -> None:
        """Closes the bus and kills all processes without a stop request, because workers may be in a long operation."""
        try:
            with suppress(BusLost):
                blocking(self.bus.close(reason=reason, timeout_s=self._context.config.run.stop_timeout_s))
        finally:
            self.kill()

    def close(self, reason: str, *, failed: str | None = None) -> None:
        """Ends every process in order: first the bus, so no worker waits for the bus, then the workers.

        Engine owners end their engines. If the worker ``failed`` is a rank, all ranks of its role are killed without a
        stop request, because they may wait forever for this worker in a collective.

        If the ledger's last events did not reach its file, raises LedgerUnwritable or BusTimeout after every process
        has ended.
        """
        timeout_s = self._context.config.run.stop_timeout_s
        try:
            with suppress(BusLost):  # no worker waits for a bus that has exited
                blocking(self.bus.close(reason=reason, timeout_s=timeout_s))
        finally:
            ranks = self._ranks_with(failed) if failed is not None else set()
            asked = [worker for name, worker in self.workers.items() if name not in ranks]
            for worker in asked:
                worker.request_stop.remote()
            ends = [worker.join.remote(timeout_s / 2) for worker in asked]
            ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
            self._kill_actors()
            self.bus.terminate()

    def _ranks_with(self, worker: str) -> set[str]:
        """Returns all ranks of the worker group of ``worker``; empty for a role without ranks."""
        role = worker.rpartition("-")[0]
        return {worker_name(role, rank) for rank in range(self.roles[role])} if role in OTHER_RANKS else set()

    def kill(self) -> None:
        """Kills every process and waits until all have exited. After that no process can change the run's files.

        Raises RuntimeError for a process that does not end.
        """
        self._kill_actors()
        self.bus.terminate()
        here = [status for status in self._statuses.values() if status.host == process_host()]
        pids = {pid for status in here for pid in (status.pid, *status.child_pids)}
        if self._context.config.launcher.ray_address is None:  # in an external cluster the bus may be on another host
            pids.add(self.bus_pid)
        kill_trees(pids)

    def _kill_actors(self) -> None:
        for worker in self.handles().values():
            ray.kill(worker)
        for group in self._reserved.values():
            remove_placement_group(group)

    def _abandon(self) -> None:
        """Kills the Ray actors of services that did not start completely."""
        self._kill_actors()
        with suppress(ValueError):  # the bus does not exist
            ray.kill(ray.get_actor(BUS, namespace=self._context.namespace))


def _left_s(ends: float) -> float:
    """Returns the seconds until the monotonic time ``ends``, at least 1."""
    return max(1.0, ends - time.monotonic())

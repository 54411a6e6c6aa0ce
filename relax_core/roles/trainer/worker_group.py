"""Implements the worker group of a model, which calls the back ends of all ranks: the lead's and the other processes'.

The trainer's worker group also calls the critic. `assemble_ranks` finds the ranks above 0 for a role's lead and builds
the model on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from relax_core.contracts.bus import Lease
from relax_core.contracts.columns import GroupColumns
from relax_core.contracts.engine import WeightManifest
from relax_core.contracts.tree import TokenTree
from relax_core.roles.discovery import discover_worker
from relax_core.roles.failure import RankLost, first_cause, is_broken_collective
from relax_core.roles.process_placement import node_address
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.trainer.build_backend import build_role_backend, load_published, role_parallel, store_address
from relax_core.roles.trainer.rank_worker import RankGroups, TreePart, parts_of
from relax_core.train.checkpoints.checkpoint_store import SLOWEST_WRITE_S
from relax_core.train.micro_batches import ROW, UpdateMetrics, split_over_ranks, with_row_numbers
from relax_core.train.parallel_layout import replica_ranks, world_size

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.train.policy_backend import MegatronBackend
    from relax_core.weights.lora_merge import LoraFactors


POLICY, CRITIC = "train", "critic"  # the folders of policy and critic in a checkpoint
DEATH_SHOWS_S = 10.0  # seconds; Ray reports the death of a process shortly after the death has broken a collective

Member = tuple[str, Any]  # a worker's name and its Ray handle
Sent = Sequence[tuple[str, Any]]  # a worker's name and the Ray reference of its answer
WaitingOn = Callable[..., AbstractContextManager[None]]  # `Worker.waiting`


def raise_cause(method: str, sent: Sent, error: BaseException) -> None:
    """Raises the cause of ``error``, an error in a call to all ranks, if the answers of the ranks in ``sent`` show it.

    Raises RankLost if one of these ranks is lost. If ``error`` is a broken collective, raises the error of the rank
    that caused the break. If the answers do not show a cause, returns.
    """
    references = {reference: name for name, reference in sent}
    ray.wait(list(references), num_returns=len(references), timeout=DEATH_SHOWS_S)
    own = []
    for reference, name in references.items():
        try:
            ray.get(reference, timeout=0)
        except RayActorError as death:
            raise RankLost(f"{name} was lost in {method}: {death}") from error
        except RankLost as restarted:
            raise RankLost(f"{name} was lost in {method}: {first_cause(restarted)}") from error
        except GetTimeoutError:  # this rank still waits in the collective
            continue
        except RayTaskError as failure:
            if not is_broken_collective(first_cause(failure)):
                own.append(failure)
    if own and is_broken_collective(first_cause(error)):
        raise own[0] from error


def take_answers(method: str, sent: Sent, *, timeout_s: float, waiting: WaitingOn) -> list[Any]:
    """Returns the answers of all workers in ``sent``, in order.

    Raises RankLost for a worker that is lost or has not answered within ``timeout_s``, and the errors of workers.
    """
    deadline = time.monotonic() + timeout_s
    answers = []
    for name, reference in sent:
        with waiting(f"its part of {method}", on=name):
            try:
                answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
            except (RayActorError, RankLost) as error:
                raise RankLost(f"{name} was lost in {method}: {first_cause(error)}") from error
            except GetTimeoutError as error:
                raise RankLost(f"{name} was lost in {method}: no answer within {timeout_s:.0f} s") from error
            except RayTaskError as error:
                if is_broken_collective(first_cause(error)):
                    raise_cause(method, sent, error)
                raise
    return answers


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Holds the ranks of a role.

    ``name`` is the name of the lead's worker, and ``lead`` the lead's back end. ``other_ranks`` are ranks 1, 2, ….
    ``replicas`` lists the ranks of each data-parallel replica; all ranks of a replica get the same groups.
    """

    name: str
    lead: MegatronBackend
    other_ranks: Sequence[Member]
    replicas: Sequence[Sequence[int]]


class WorkerGroup:
    """Calls all ranks of a role's model.

    Each call goes to the other ranks before the lead, so collectives can complete.

    ``waiting`` records the workers that the lead may be waiting for.
    """

    def __init__(self, ranks: Ranks, *, timeout_s: float, waiting: WaitingOn) -> None:
        self.lead = ranks.lead
        self._name, self._other_ranks, self._replicas = ranks.name, ranks.other_ranks, ranks.replicas
        self._timeout_s = timeout_s
        self._waiting = waiting

    @property
    def alone(self) -> bool:
        """Returns whether the lead is the only rank."""
        return not self._other_ranks

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights as `MegatronBackend.export` does."""
        yield from self._exported("export")

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all weights without LoRA factors."""
        yield from self._exported("export_base")

    def export_factors(self) -> Iterator[LoraFactors]:
        """Yields the LoRA factors of all adapted weights."""
        yield from self._exported("export_factors")

    def _exported(self, method: str) -> Iterator[Any]:
        sent = self._send(self._other_ranks, "export", method)
        with self._collective("export", sent):
            yield from getattr(self.lead, method)()
        self._wait("export", sent)

    def logprobs(self, groups: Sequence[TokenTree], *, method: str = "logprobs") -> list[np.ndarray]:
        """Returns the log-probs under the current weights, float32 ``[rows]`` for each group, in order.

        ``method`` is the back end's method, such as "reference_logprobs" for the weights of the reference.
        """
        of_lead: Callable[[Sequence[TokenTree]], list[np.ndarray]] = getattr(self.lead, method)
        if not self._other_ranks:
            return of_lead(groups)
        shares = split_over_ranks(with_row_numbers(groups), len(self._replicas), tower=self.lead.tower_work)
        answering = {ranks[0] for ranks in self._replicas}
        sent = self._send_shares(method, shares, answering=answering)
        with self._collective(method, sent):
            mine = of_lead(shares[0])
        answers = [mine, *self._wait(method, sent)]
        ends = np.cumsum([group.rows for group in groups])
        found = np.zeros(int(ends[-1]), dtype=np.float32)
        for ranks, share in zip(self._replicas, shares, strict=True):
            for piece, values in zip(share, answers[ranks[0]], strict=True):
                found[piece.extras[ROW]] = values
        return np.split(found, ends[:-1])

    def load_published(self, manifest: WeightManifest) -> bool:
        """Loads a published version on all ranks. Returns False if it was replaced before all ranks had read it."""
        sent = self._send(self._other_ranks, "load_published", manifest)
        with self._collective("load_weights", sent):
            mine = load_published(self.lead, manifest)
        return all([mine, *self._wait("load_weights", sent)])

    # -- parts --------------------------------------------------------------------------------------------------
    def _send_shares(
        self, method: str, shares: Sequence[list[TokenTree]], *, answering: set[int]
    ) -> list[tuple[str, Any]]:
        """Sends each rank except the lead the groups of its replica.

        The ranks in ``answering`` return their answers.
        """
        sent = []
        for ranks, share in zip(self._replicas, shares, strict=True):
            other_ranks = [rank for rank in ranks if rank > 0]
            argument = ray.put(share) if len(other_ranks) > 1 else share
            for rank in other_ranks:
                name, other_rank = self._other_ranks[rank - 1]
                call = other_rank.call if rank in answering else other_rank.follow
                sent.append((rank, name, call.remote(method, argument)))
        return [(name, reference) for _, name, reference in sorted(sent, key=lambda pair: pair[0])]

    @staticmethod
    def _send(to: Sequence[Member], method: str, *arguments: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(handle, method).remote(*arguments)) for name, handle in to]

    @contextmanager
    def _collective(self, method: str, sent: Sent) -> Iterator[None]:
        """Wraps the lead's part of a call, and replaces the error of a broken collective by the cause of the break."""
        if not sent:
            yield
            return
        with ExitStack() as waits:
            for name in (self._name, *(name for name, _ in sent)):  # the lead may be waiting for any of these ranks
                waits.enter_context(self._waiting(f"{method} of all ranks", on=name))
            try:
                yield
            except RuntimeError as error:
                raise_cause(method, sent, error)
                raise

    def _wait(self, method: str, sent: Sent) -> list[Any]:
        return take_answers(method, sent, timeout_s=self._timeout_s, waiting=self._waiting)


class TrainerWorkerGroup(WorkerGroup):
    """Calls the policy's ranks and, if it exists, the critic. The critic works concurrently with the lead.

    The other ranks and the critic get the uids of the episodes to train, and read the groups from the bus. With
    ``rank_groups`` the lead also reads its groups from the bus; otherwise it trains the trees in its arguments.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        timeout_s: float,
        waiting: WaitingOn,
        critic: Any | None = None,
        rank_groups: RankGroups | None = None,
    ) -> None:
        super().__init__(ranks, timeout_s=timeout_s, waiting=waiting)
        self._critic: list[Member] = [] if critic is None else [(worker_name("critic", 0), critic)]
        self._rank_groups = rank_groups
        self._step = -1
        self._lease_ids: dict[str, int] = {}  # the leases of the step's groups

    def begin_step(self, step: int) -> None:
        """Begins train step ``step`` on all ranks and the critic."""
        if step != self._step:
            self._step, self._lease_ids = step, {}
        self._all("begin_step", step, of_critic=(step,))

    def add_lease(self, lease: Lease) -> None:
        """Records the lease of the step's next groups. Call this method before `accumulate` with these groups."""
        self._lease_ids.update((row.group_uid, lease.lease_id) for row in lease.rows)

    def add_columns(self, step: int, columns: GroupColumns) -> None:
        """Adds computed columns to the groups of train step ``step`` where ranks and critic read groups from the bus.

        Call this method before `accumulate` with these groups.
        """
        sent = self._send([*self._other_ranks, *self._critic], "add_columns", step, columns)
        if self._rank_groups is not None:
            self._rank_groups.add(step, columns)
        self._wait("add_columns", sent)

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Trains on a micro-batch of all data-parallel ranks."""
        if not groups:
            return
        shares = split_over_ranks(groups, len(self._replicas), tower=self.lead.tower_work)
        parts: list[list[TreePart]] = [[] for _ in range(1 + len(self._other_ranks))]  # by rank
        for ranks, share in zip(self._replicas, shares, strict=True):
            own = self._parts(share)
            for rank in ranks:
                parts[rank] = own
        sent = [
            (name, other_rank.accumulate.remote(self._step, own))
            for (name, other_rank), own in zip(self._other_ranks, parts[1:], strict=True)
        ]
        sent += self._send(self._critic, "accumulate", self._step, self._parts(groups))
        mine = shares[0] if self._rank_groups is None else self._rank_groups.trees(self._step, parts[0])
        with self._collective("accumulate", sent):
            self.lead.accumulate(mine)
        self._wait("accumulate", sent)

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Counts groups without a gradient. Only the lead counts them."""
        if groups:
            self.lead.count(groups)

    def _parts(self, trees: Sequence[TokenTree]) -> list[TreePart]:
        return parts_of(trees, self._lease_ids) if self._other_ranks or self._critic else []

    def finish_step(self) -> UpdateMetrics:
        """Ends the step and returns the metrics of policy and critic, with the times of all ranks."""
        sent = self._send(self._other_ranks, "finish_step") + self._send(self._critic, "finish_step")
        with self._collective("finish_step", sent):
            policy = self.lead.finish_step()
            times = self.lead.times
        answers = self._wait("finish_step", sent)
        other_answers = answers[: len(self._other_ranks)]
        return UpdateMetrics(policy=policy, critic=answers[-1] if self._critic else None, ranks=(times, *other_answers))

    def copy_state(self) -> None:
        """Copies the state of a checkpoint to the host, on all ranks and the critic."""
        self._all("copy_state")

    def write_copy(self, folder: Path) -> None:
        """Writes the copies to ``folder``/train and, with a critic, ``folder``/critic. Callable from any thread.

        This method runs during train steps and does not detect a stalled write. Until `drop_copies` it may be called
        again with the same copies, also after an OSError. It raises an OSError only after all processes have stopped
        writing.
        """
        sent = self._send(self._other_ranks, "write_copy", folder / POLICY)
        sent += self._send(self._critic, "write_copy", folder / CRITIC)
        try:
            with self._collective("write_copy", sent):
                self.lead.write_copy(folder / POLICY)
            take_answers("write_copy", sent, timeout_s=SLOWEST_WRITE_S, waiting=self._waiting)
        except OSError as error:
            if sent:
                ray.wait([answer for _, answer in sent], num_returns=len(sent), timeout=SLOWEST_WRITE_S)
            raise first_cause(error) from error

    def drop_copies(self) -> None:
        """Frees the copies after the checkpoint is written, on all ranks and the critic. Callable from any thread."""
        sent = self._send([*self._other_ranks, *self._critic], "drop_copy")
        self.lead.drop_copy()
        self._wait("drop_copy", sent)

    def close_samples(self) -> None:
        """Writes the samples of the last train step on all ranks. The critic has no samples."""
        sent = self._send(self._other_ranks, "follow", "close_samples")
        self.lead.close_samples()
        self._wait("close_samples", sent)

    def offload_optimizer(self) -> None:
        """Moves gradients and optimizer state of all ranks to the host; the weights can still be exported."""
        self._all_ranks("offload_optimizer")

    def offload(self) -> None:
        """Moves the rest of the state of all ranks to the host."""
        self._all_ranks("offload")

    def onload(self) -> None:
        """Returns the state of all ranks to their devices."""
        self._all_ranks("onload")

    def _all_ranks(self, method: str) -> None:
        assert not self._critic, "a critic shares no GPUs"
        self._all(method)

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that `write_copy` wrote, possibly with another layout."""
        self._all("load", folder / POLICY, of_critic=(folder / CRITIC,))

    def _all(self, method: str, *arguments: Any, of_critic: Sequence[Any] = ()) -> None:
        """Calls a method of every rank and the critic."""
        sent = self._send(self._other_ranks, "follow", method, *arguments) + self._send(
            self._critic, method, *of_critic
        )
        with self._collective(method, sent):
            getattr(self.lead, method)(*arguments)
        self._wait(method, sent)


RETRY_S = 0.1


def assemble_ranks(
    context: RunContext, role: str, *, waiting: WaitingOn, on_loss: Callable[[RankLost], None] | None = None
) -> Ranks:
    """Returns the ranks of a role when each rank has built its part of the model.

    Raises TimeoutError for a rank that is not found within ``run.start_timeout_s``; RankLost for a rank that is lost
    during the build, or builds longer than this timeout; ActorDiedError for a rank that Ray does not restart; and the
    errors of ranks. ``on_loss`` is called with the RankLost at once, in another thread, because the lead may wait in a
    collective.
    """
    layout = role_parallel(context.config, role)
    ranks = world_size(layout)
    timeout_s = context.config.run.start_timeout_s
    if ranks > 1:
        import relax_core.train.policy_backend  # noqa: F401  # takes seconds; the other ranks import at the same time
    names = [worker_name(role, rank) for rank in range(ranks)]
    other_ranks = []
    for name in names[1:]:
        with waiting("its start", on=name):
            other_ranks.append((name, _restarted_rank(context, name)))
    address = store_address(context, host=node_address(context.config.launcher))
    built = [(name, other_rank.build.remote(address)) for name, other_rank in other_ranks]
    if built and on_loss is not None:
        threading.Thread(target=watch_build, args=(built, timeout_s, on_loss), name="build-watch", daemon=True).start()
    try:
        lead = build_role_backend(context, role, rank=0, store_address=address)
    except RuntimeError as error:
        if built:
            raise_cause("build", built, error)
        raise
    take_answers("build", built, timeout_s=timeout_s, waiting=waiting)
    return Ranks(name=names[0], lead=lead, other_ranks=other_ranks, replicas=replica_ranks(layout))


def watch_build(sent: Sent, timeout_s: float, on_loss: Callable[[RankLost], None]) -> None:
    """Calls ``on_loss`` immediately when a rank is lost or has not answered in time.

    An error that a rank raises is not handled here, because the lead gets the error as the rank's answer.
    """
    deadline = time.monotonic() + timeout_s
    names = {reference: name for name, reference in sent}
    while names:
        ready, _ = ray.wait(list(names), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for reference in ready or list(names)[:1]:
            try:
                ray.get(reference, timeout=0)
            except GetTimeoutError:
                on_loss(RankLost(f"{names[reference]} was lost in build: no answer within {timeout_s:.0f} s"))
                return
            except RayActorError as death:
                on_loss(RankLost(f"{names[reference]} was lost in build: {death}"))
                return
            except RayTaskError:
                pass
            del names[reference]


def _restarted_rank(context: RunContext, name: str) -> Any:
    """Returns the rank's Ray handle. If the rank belongs to an earlier lead, kills it first, so Ray restarts it."""
    deadline = time.monotonic() + context.config.run.start_timeout_s
    other_rank = discover_worker(context, name)
    killed: int | None = None
    while True:
        try:
            pid = ray.get(other_rank.taken_pid.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except ActorUnavailableError:
            pid = killed
        except GetTimeoutError as error:
            raise TimeoutError(f"{name} was not found within {context.config.run.start_timeout_s:.0f} s") from error
        else:
            if pid is None:
                return other_rank
            if pid != killed:
                ray.kill(other_rank, no_restart=False)
                killed = pid
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not restart within {context.config.run.start_timeout_s:.0f} s")
        time.sleep(RETRY_S)

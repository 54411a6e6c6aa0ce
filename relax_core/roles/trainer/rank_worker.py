"""Implements the ranks above 0 of a role, and reads the parts of groups that a rank trains.

These ranks execute the calls of the role's lead, rank 0. The lead names the parts of groups, and the rank reads the
parts from the bus.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from relax_core.bus.ray_bus import blocking
from relax_core.bus.staleness import StalenessWindow, oldest_version
from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.bus import Bus
from relax_core.contracts.engine import WeightManifest
from relax_core.contracts.outage import is_outage
from relax_core.contracts.train import RankTimes
from relax_core.contracts.tree import TokenTree
from relax_core.observe.process_usage import UsageMeter
from relax_core.registry import find_algorithm
from relax_core.roles.discovery import discover_bus
from relax_core.roles.failure import RankLost, failure_line, is_broken_collective, what_was_lost
from relax_core.roles.process_placement import actor_columns, on_this_node
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.trainer.build_backend import build_role_backend, load_published
from relax_core.roles.worker import RUN_PLUGINS, Wait, WorkerStatus, keep_output, process_host, python_stacks
from relax_core.train.micro_batches import decode_train_tree, piece_of

if TYPE_CHECKING:
    from relax_core.train.policy_backend import MegatronBackend


CRITIC_COLUMNS = (*c.FORWARD_COLUMNS, c.LOSS_MASK, c.VALUES, c.RETURNS)


class TreePart(msgspec.Struct, frozen=True, array_like=True):
    """Holds adjacent episodes of one group.

    ``lease_id`` is the lease that the rank uses to read the group. If a group is split into several parts,
    ``counts_group`` is True for one part, so the group is counted once.
    """

    lease_id: int
    group_uid: str
    uids: list[str]
    counts_group: bool


def parts_of(trees: Iterable[TokenTree], lease_ids: Mapping[str, int]) -> list[TreePart]:
    """Returns the parts for ``trees``, each a group or a part of a group. ``lease_ids`` maps group uids to leases."""
    return [
        TreePart(
            lease_ids[tree.group_uid], tree.group_uid, [episode.uid for episode in tree.episodes], tree.counts_group
        )
        for tree in trees
    ]


class RankGroups:
    """Reads the groups of a step from the bus. Each group is read once per step, even if several updates train on it.

    ``columns`` lists the columns that this rank reads; `add` adds the columns that the actor's ranks have computed.
    ``window`` limits the age of tokens. ``timeout_s`` is the time
    limit of one read in seconds.
    """

    def __init__(self, bus: Bus, *, columns: Sequence[str], window: StalenessWindow, timeout_s: float) -> None:
        self._bus, self._columns = bus, tuple(columns)
        self._window, self._timeout_s = window, timeout_s
        self._step = -1
        self._groups: dict[str, TokenTree] = {}
        self._computed: c.GroupColumns = {}

    def add(self, step: int, columns: c.GroupColumns) -> None:
        """Adds columns to the groups of train step ``step``, before `trees` of these groups."""
        self._begin(step)
        self._computed |= columns

    def trees(self, step: int, parts: Sequence[TreePart]) -> list[TokenTree]:
        """Returns the token trees of the parts for train step ``step``, in the order of the parts.

        Raises BusTimeout if the bus does not answer within ``timeout_s``, LeaseLost if a part's lease has ended, and
        BusLost if the bus has exited.
        """
        self._begin(step)
        unread: dict[int, dict[str, None]] = {}  # lease → its group uids, each once, in order
        for part in parts:
            if part.group_uid not in self._groups:
                unread.setdefault(part.lease_id, {})[part.group_uid] = None
        for lease_id, group_uids in unread.items():
            self._read(lease_id, list(group_uids))
        return [_part_of(self._groups[part.group_uid], part) for part in parts]

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step, self._groups, self._computed = step, {}, {}

    def _read(self, lease_id: int, group_uids: list[str]) -> None:
        oldest = oldest_version(self._step, self._window)
        rows = blocking(self._bus.read(lease_id, group_uids, columns=self._columns, timeout_s=self._timeout_s))
        for row in c.with_columns(rows, self._computed):
            self._groups[row.group_uid], _ = decode_train_tree(row, step=self._step, oldest_version=oldest)


def _part_of(tree: TokenTree, part: TreePart) -> TokenTree:
    first = [episode.uid for episode in tree.episodes].index(part.uids[0])
    piece = piece_of(tree, first, first + len(part.uids))
    assert [episode.uid for episode in piece.episodes] == part.uids, "a part holds adjacent episodes"
    return piece if piece.counts_group == part.counts_group else replace(piece, counts_group=part.counts_group)


def policy_groups(context: RunContext, bus: Bus) -> RankGroups:
    """Returns the reader of groups for a policy rank."""
    return _rank_groups(context, bus, policy_columns(context.config))


def critic_groups(context: RunContext, bus: Bus) -> RankGroups:
    """Returns the reader of groups for the critic."""
    return _rank_groups(context, bus, _without_computed(CRITIC_COLUMNS, context.config))


def _rank_groups(context: RunContext, bus: Bus, columns: Sequence[str]) -> RankGroups:
    config = context.config
    return RankGroups(bus, columns=columns, window=config.mode, timeout_s=config.run.stall_timeout_s)


def policy_columns(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the columns that the policy reads from the bus, without the columns that its own ranks compute."""
    requirements = find_algorithm(config.algo.name).requirements(config.algo)
    columns = train_columns(requirements, routing_replay=config.algo.routing_replay, truncates=config.rollout.truncates)
    return _without_computed(columns, config)


def _without_computed(columns: Sequence[str], config: RelaxConfig) -> tuple[str, ...]:
    computed = actor_columns(config)
    return tuple(column for column in columns if column not in computed)


def train_columns(requirements: Requirements, *, routing_replay: bool, truncates: bool) -> tuple[str, ...]:
    """Returns the policy's columns: the rollout's columns, the advantages, and the columns that the algorithm requires.

    ``truncates`` is True if top_k, top_p or min_p excludes tokens.
    """
    extra = [c.ADVANTAGES]
    if routing_replay:
        extra.append(c.ROUTED_EXPERTS)
    if truncates:
        extra.append(c.KEPT_TOKENS)
    if requirements.old_logprobs == "actor_fwd":
        extra.append(c.OLD_LOGPROBS)
    if requirements.reference:
        extra.append(c.REFERENCE_LOGPROBS)
    if requirements.teacher is not None:
        extra.append(c.TEACHER_LOGPROBS)
        if requirements.teacher.top_k:
            extra += [c.TEACHER_TOP_IDS, c.TEACHER_TOP_LOGPROBS]
    if requirements.critic:
        extra += [c.VALUES, c.RETURNS]
    return (*c.ROLLOUT_COLUMNS, *extra)


log = logging.getLogger(__name__)
STATUS_GROUPS = {"status": 1, "files": 1}  # status calls and file writes have separate threads


class RankWorker:
    """Executes the lead's calls one after the other, in order; only status calls and file writes run concurrently.

    Start this actor with `STATUS_GROUPS`. The process belongs to one lead: a restarted lead needs new processes for the
    ranks above 0. If this process was restarted, calls of its former lead raise RankLost.

    With ``ends_with_others`` the process exits if a collective breaks, and Ray restarts it. So the break also reaches a
    lead that had no connection to the rank that died.
    """

    role: str
    ends_with_others = False

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        if self.role in RUN_PLUGINS:
            keep_output(context.log_dir / f"{name}.log")
        self.warm_up()
        self._name, self._context, self._rank = name, on_this_node(context), rank
        self._taken = False
        self._usage = UsageMeter()
        self._built: MegatronBackend | None = None
        self._failure: BaseException | None = None  # the first failure that this rank caused
        self._failed_at = 0.0
        self._doing, self._since = "", time.time()
        self._wait: Wait | None = None

    def warm_up(self) -> None:
        """Imports the back end. The import takes seconds, so it runs while the lead also imports."""
        import relax_core.train.policy_backend  # noqa: F401

    # -- called by the lead -----------------------------------------------------------------------------------------
    def build(self, store_address: str) -> None:
        """Builds this rank's part of the model together with all other ranks."""
        self._taken = True
        with self._busy("build"):
            self._built = build_role_backend(self._context, self.role, rank=self._rank, store_address=store_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls the back end and returns the result."""
        with self._busy(method):
            return getattr(self._backend, method)(*arguments)

    def follow(self, method: str, *arguments: Any) -> None:
        """Calls the back end without returning the result."""
        self.call(method, *arguments)

    def export(self, method: str) -> None:
        """Does this rank's part of an export by a method of `MegatronBackend`; rank 0 gets the tensors."""
        with self._busy("export"):
            for _ in getattr(self._backend, method)():
                raise AssertionError("only rank 0 gets tensors")

    def load_published(self, manifest: WeightManifest) -> bool:
        """Loads a published version. Returns False if newer versions have replaced it."""
        with self._busy("load_weights"):
            return load_published(self._backend, manifest)

    @ray.method(concurrency_group="files")
    def write_copy(self, folder: Path) -> None:
        """Writes this rank's part of a checkpoint during train steps. The lead repeats the call after an outage."""
        with self._failures("write_copy"):
            self._backend.write_copy(folder)

    @ray.method(concurrency_group="files")
    def drop_copy(self) -> None:
        """Frees the copy after the checkpoint is written."""
        self._backend.drop_copy()

    # -- called by any process --------------------------------------------------------------------------------------
    @ray.method(concurrency_group="status")
    def taken_pid(self) -> int | None:
        """Returns this process's pid if the process has a lead, else None."""
        return os.getpid() if self._taken else None

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
        """Returns this rank's status."""
        lead = worker_name(self.role, 0)
        failure = self._failure
        if failure is not None:
            return WorkerStatus(
                name=self._name,
                state="failed",
                since=self._failed_at,
                pid=os.getpid(),
                detail=failure_line(failure),
                error="".join(traceback.format_exception(failure)),
                lost=what_was_lost(failure),
                host=process_host(),
            )
        idle = Wait(what="its next call", on=lead, since=self._since)
        return WorkerStatus(
            name=self._name,
            state="running" if self._taken else "starting",
            since=self._since,
            pid=os.getpid(),
            detail=f"{self._doing or 'waits'}, driven by {lead}",
            error=None,
            host=process_host(),
            waits=self._waits_of(idle),
            usage=self._usage.newest(),
        )

    def _waits_of(self, idle: Wait) -> tuple[Wait, ...]:
        wait = self._wait if self._doing else idle
        return () if wait is None else (wait,)

    @ray.method(concurrency_group="status")
    def stacks(self) -> dict[str, str]:
        """Returns the stacks of this process's threads."""
        return python_stacks()

    @ray.method(concurrency_group="status")
    def request_stop(self) -> None:
        """Does nothing, because the rank stops with its lead."""

    @ray.method(concurrency_group="status")
    def join(self, timeout_s: float) -> bool:
        """Returns True, because the rank has no loop to wait for."""
        return True

    @property
    def _backend(self) -> MegatronBackend:
        if self._built is None:
            raise RankLost(f"{self._name} was restarted")
        return self._built

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Iterator[None]:
        """Records a wait of this rank for ``what`` on a worker while the block runs."""
        self._wait = Wait(what=what, on=on, since=time.time())
        try:
            yield
        finally:
            self._wait = None

    @contextmanager
    def _busy(self, method: str) -> Iterator[None]:
        self._doing, self._since = method, time.time()
        try:
            with self._failures(method):
                yield
        finally:
            self._doing, self._since = "", time.time()

    @contextmanager
    def _failures(self, method: str) -> Iterator[None]:
        """Stores the first failure that this rank caused, for `status`. The lead may be waiting and not receive it."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            if method == "write_copy" and is_outage(error):
                log.warning("%s could not write its part of a checkpoint: %s", self._name, error)
            elif not is_broken_collective(error):
                self._fail(method, error)
            elif self.ends_with_others:
                log.error("%s ends, because a collective of %s broke: %s", self._name, method, error)
                logging.shutdown()
                os._exit(1)
            raise

    def _fail(self, method: str, error: Exception) -> None:
        if self._failure is None:
            log.error("%s failed in %s", self._name, method, exc_info=error)
            self._failed_at, self._failure = time.time(), error


class ActorRank(RankWorker):
    """Runs a rank of the trainer. Each role has a separate class, because Ray titles a process by its class."""

    role = "actor"
    _rank_groups: RankGroups

    def build(self, store_address: str) -> None:
        """Builds this rank's part of the model, and connects to the bus."""
        super().build(store_address)
        with self._busy("build"):
            self._rank_groups = policy_groups(self._context, discover_bus(self._context, self.waiting))

    def accumulate(self, step: int, parts: Sequence[TreePart]) -> None:
        """Trains on these parts of groups, which this rank reads from the bus."""
        with self._busy("accumulate"):
            backend = self._backend
            backend.accumulate(self._rank_groups.trees(step, parts))

    def add_columns(self, step: int, columns: c.GroupColumns) -> None:
        """Adds columns that the actor's ranks have computed to the groups of train step ``step``."""
        self._rank_groups.add(step, columns)

    def finish_step(self) -> RankTimes:
        """Ends the update and returns this rank's times."""
        with self._busy("finish_step"):
            self._backend.finish_step()
            return self._backend.times


class ActorFwdRank(RankWorker):
    """Runs a rank of actor_fwd."""

    role = "actor_fwd"
    ends_with_others = True


class ReferenceRank(RankWorker):
    """Runs a rank of the reference."""

    role = "reference"
    ends_with_others = True

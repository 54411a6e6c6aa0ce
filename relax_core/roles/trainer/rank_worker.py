"""A rank above 0 of a role with several processes, which executes the calls of the role's lead, rank 0."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from relax_core.contracts.engine import WeightManifest
from relax_core.contracts.train import RankTimes
from relax_core.observe.process_usage import UsageMeter
from relax_core.roles.process.discovery import discover_bus
from relax_core.roles.process.failure import RankLost, failure_line, is_broken_collective, what_was_lost
from relax_core.roles.process.output_log import keep_output
from relax_core.roles.process.process_placement import on_this_node
from relax_core.roles.process.role_context import RunContext, worker_name
from relax_core.roles.process.worker import RUN_PLUGINS, Wait, WorkerStatus, process_host, python_stacks
from relax_core.roles.trainer.build_backend import build_role_backend, load_published
from relax_core.roles.trainer.rank_batches import RankGroups, TreePart, policy_groups

if TYPE_CHECKING:
    from relax_core.train.policy_backend import MegatronBackend

log = logging.getLogger(__name__)
STATUS_GROUPS = {"status": 1, "files": 1}  # the status and file writes have their own threads


class RankWorker:
    """Executes the lead's calls one after the other, in order; only status and file writes run beside them.

    Start it with `STATUS_GROUPS`. It belongs to one lead: a restarted lead needs new other ranks, and if this process
    itself was restarted, the calls of its former lead raise RankLost.

    With ``ends_with_others``, Ray restarts it, so it exits if a collective breaks. The break then reaches a lead that
    has no connection to the rank that died.
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
        self._failure: BaseException | None = None  # the first failure of this rank's own
        self._failed_at = 0.0
        self._doing, self._since = "", time.time()
        self._wait: Wait | None = None

    def warm_up(self) -> None:
        """Imports what the back end needs, which takes seconds in which the lead does so too."""
        import relax_core.train.policy_backend  # noqa: F401

    # -- called by the lead -----------------------------------------------------------------------------------------
    def build(self, store_address: str) -> None:
        """Builds this rank's part of the model together with all other ranks."""
        self._taken = True
        with self._busy("build"):
            self._built = build_role_backend(self._context, self.role, rank=self._rank, store_address=store_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls the back end and returns its answer."""
        with self._busy(method):
            return getattr(self._backend, method)(*arguments)

    def follow(self, method: str, *arguments: Any) -> None:
        """Calls the back end without returning its answer."""
        self.call(method, *arguments)

    def export(self) -> None:
        """Takes part in an export, whose tensors rank 0 gets."""
        with self._busy("export"):
            for _ in self._backend.export():
                raise AssertionError("only rank 0 gets tensors")

    def load_published(self, manifest: WeightManifest) -> bool:
        """Loads a published version; returns False if newer ones have replaced it."""
        with self._busy("load_weights"):
            return load_published(self._backend, manifest)

    @ray.method(concurrency_group="files")
    def write_copy(self, folder: Path) -> None:
        """Writes this rank's part of a checkpoint, beside the train step."""
        with self._failures("write_copy"):
            self._backend.write_copy(folder)

    # -- called by any process --------------------------------------------------------------------------------------
    @ray.method(concurrency_group="status")
    def taken_pid(self) -> int | None:
        """Returns this process's pid once it has a lead, else None."""
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
        """Records, while the block runs, what this rank waits for and on which worker."""
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
        """Stores the first failure of this rank's own for `status`, because the lead may wait and not receive it."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            if not is_broken_collective(error):
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
    """Is a rank of the trainer; each role has its own class, because Ray titles a process by its class."""

    role = "actor"
    _rank_groups: RankGroups

    def build(self, store_address: str) -> None:
        """Builds this rank's part of the model and connects to the bus."""
        super().build(store_address)
        with self._busy("build"):
            self._rank_groups = policy_groups(self._context, discover_bus(self._context, self.waiting))

    def accumulate(self, step: int, parts: Sequence[TreePart]) -> None:
        """Trains on these parts of groups, which this rank reads from the bus."""
        with self._busy("accumulate"):
            backend = self._backend
            backend.accumulate(self._rank_groups.trees(step, parts))

    def finish_step(self) -> RankTimes:
        """Ends the update and returns the times of this rank."""
        with self._busy("finish_step"):
            self._backend.finish_step()
            return self._backend.times


class ActorFwdRank(RankWorker):
    """Is a rank of actor_fwd."""

    role = "actor_fwd"
    ends_with_others = True


class ReferenceRank(RankWorker):
    """Is a rank of the reference."""

    role = "reference"
    ends_with_others = True

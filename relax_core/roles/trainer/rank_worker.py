"""A rank > 0 of a role that spans several processes: it does what the role's lead, rank 0, tells it to."""

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
from relax_core.roles.process.discovery import discover_bus
from relax_core.roles.process.failure import broke_of_others, failure_line, what_was_lost
from relax_core.roles.process.output_log import keep_output
from relax_core.roles.process.role_context import RunContext, worker_name
from relax_core.roles.process.worker import RUN_PLUGINS, Wait, WorkerStatus, process_host, python_stacks
from relax_core.roles.trainer.build_backend import build_role_backend, load_published
from relax_core.roles.trainer.rank_batches import RankRows, TreePart, policy_rows
from relax_core.roles.trainer.worker_group import RankLost

if TYPE_CHECKING:
    from relax_core.train.policy_backend import MegatronBackend

log = logging.getLogger(__name__)
STATUS_GROUPS = {"status": 1, "files": 1}  # threads of their own tell how the rank is, and write its files


class RankWorker:
    """Its calls run one after the other, in the lead's order; only what it tells of itself, and files, come at once.
    Start it with `STATUS_GROUPS`. It belongs to one lead for life: a lead that was started anew needs new other ranks,
    and the calls of a lead that knew another process of its name raise RankLost.

    ``ends_with_others``: Ray starts it anew, so it ends itself where a collective breaks. So the break reaches a lead
    that has no connection to the rank that died.
    """

    role: str
    ends_with_others = False

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        if self.role in RUN_PLUGINS:
            keep_output(context.log_dir / f"{name}.log")
        self.warm_up()
        self._name, self._context, self._rank = name, context, rank
        self._taken = False
        self._built: MegatronBackend | None = None
        self._failure: BaseException | None = None  # the first of its own
        self._failed_at = 0.0
        self._doing, self._since = "", time.time()
        self._wait: Wait | None = None

    def warm_up(self) -> None:
        """Takes seconds, in which the lead does the same."""
        import relax_core.train.policy_backend  # noqa: F401

    # -- the lead's -------------------------------------------------------------------------------------------------
    def build(self, store_address: str) -> None:
        """Makes this rank's part of the model, with all other ranks."""
        self._taken = True
        with self._busy("build"):
            self._built = build_role_backend(self._context, self.role, rank=self._rank, store_address=store_address)

    def call(self, method: str, *arguments: Any) -> Any:
        """What the back end answers."""
        with self._busy(method):
            return getattr(self._backend, method)(*arguments)

    def follow(self, method: str, *arguments: Any) -> None:
        """`call`, where the lead wants no answer."""
        self.call(method, *arguments)

    def export(self) -> None:
        """This rank's share in an export, which the lead gets."""
        with self._busy("export"):
            for _ in self._backend.export():
                raise AssertionError("rank 0 alone gets tensors")

    def load_published(self, manifest: WeightManifest) -> bool:
        """`relax_core.roles.trainer.build_backend.load_published` here."""
        with self._busy("load_weights"):
            return load_published(self._backend, manifest)

    @ray.method(concurrency_group="files")
    def write_copy(self, folder: Path) -> None:
        """This rank's share in the write of a checkpoint; the step goes on beside it."""
        with self._failures("write_copy"):
            self._backend.write_copy(folder)

    # -- anyone's ---------------------------------------------------------------------------------------------------
    @ray.method(concurrency_group="status")
    def taken_pid(self) -> int | None:
        """This process, once it has a lead."""
        return os.getpid() if self._taken else None

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
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
            detail=f"{self._doing or 'waits'} as {lead} says",
            error=None,
            host=process_host(),
            waits=self._waits_of(idle),
        )

    def _waits_of(self, idle: Wait) -> tuple[Wait, ...]:
        wait = self._wait if self._doing else idle
        return () if wait is None else (wait,)

    @ray.method(concurrency_group="status")
    def stacks(self) -> dict[str, str]:
        return python_stacks()

    @ray.method(concurrency_group="status")
    def request_stop(self) -> None:
        """Nothing: it stops where its lead does."""

    @ray.method(concurrency_group="status")
    def join(self, timeout_s: float) -> bool:
        """True: it has no loop that could be waited for."""
        return True

    @property
    def _backend(self) -> MegatronBackend:
        if self._built is None:
            raise RankLost(f"{self._name} was started anew")
        return self._built

    @contextmanager
    def waiting(self, what: str, *, on: str) -> Iterator[None]:
        """Tells others what this rank waits for and on whom, for as long as the block runs."""
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
        """Keeps the first failure of this rank's own for `status`: the lead may wait for this rank, and not hear it."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            if not broke_of_others(error):
                self._fail(method, error)
            elif self.ends_with_others:
                log.error("%s ends, since a collective of %s broke: %s", self._name, method, error)
                logging.shutdown()
                os._exit(1)
            raise

    def _fail(self, method: str, error: Exception) -> None:
        if self._failure is None:
            log.error("%s failed in %s", self._name, method, exc_info=error)
            self._failed_at, self._failure = time.time(), error


class ActorRank(RankWorker):
    """Of the trainer; a class for each role, since Ray titles a process by its class."""

    role = "actor"
    _rows: RankRows

    def build(self, store_address: str) -> None:
        super().build(store_address)
        with self._busy("build"):
            self._rows = policy_rows(self._context, discover_bus(self._context, self.waiting))

    def accumulate(self, step: int, parts: Sequence[TreePart]) -> None:
        """Trains on these parts of groups, whose rows this rank reads from the bus."""
        with self._busy("accumulate"):
            backend = self._backend
            backend.accumulate(self._rows.trees(step, parts))


class ActorFwdRank(RankWorker):
    role = "actor_fwd"
    ends_with_others = True


class ReferenceRank(RankWorker):
    role = "reference"
    ends_with_others = True

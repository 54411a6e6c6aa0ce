"""A rank > 0 of a role that spans several processes: it does what the role's lead, rank 0, tells it to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from relax_core.contracts.engine import WeightManifest
from relax_core.roles.backend import build_role_backend, load_published
from relax_core.roles.context import RunContext, worker_name
from relax_core.roles.worker import Wait, WorkerStatus, process_host, python_stacks

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend

STATUS_GROUPS = {"status": 1, "files": 1}  # threads of their own tell how the rank is, and write its files


class RankPeer:
    """Its calls run one after the other, in the lead's order; only what it tells of itself, and files, come at once.
    Start it with `STATUS_GROUPS`. It belongs to one lead for life: a lead that was started anew needs new peers."""

    role: str
    _backend: MegatronBackend

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        import relax_core.train.backend  # noqa: F401  # seconds, in which the lead does the same

        self._name, self._context, self._rank = name, context, rank
        self._taken = False
        self._doing, self._since = "", time.time()

    # -- the lead's -------------------------------------------------------------------------------------------------
    def build(self, store_address: str) -> None:
        """Makes this rank's part of the model, with all other ranks."""
        self._taken = True
        with self._busy("build"):
            self._backend = build_role_backend(self._context, self.role, rank=self._rank, store_address=store_address)

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
        """`relax_core.roles.backend.load_published` here."""
        with self._busy("load_weights"):
            return load_published(self._backend, manifest)

    @ray.method(concurrency_group="files")
    def write_copy(self, folder: Path) -> None:
        """This rank's share in the write of a checkpoint; the step goes on beside it."""
        self._backend.write_copy(folder)

    # -- anyone's ---------------------------------------------------------------------------------------------------
    @ray.method(concurrency_group="status")
    def taken_pid(self) -> int | None:
        """This process, once it has a lead."""
        return os.getpid() if self._taken else None

    @ray.method(concurrency_group="status")
    def status(self) -> WorkerStatus:
        lead = worker_name(self.role, 0)
        idle = Wait(what="its next call", on=lead, since=self._since)
        return WorkerStatus(
            name=self._name,
            state="running" if self._taken else "starting",
            since=self._since,
            pid=os.getpid(),
            detail=f"{self._doing or 'waits'} as {lead} says",
            error=None,
            host=process_host(),
            waits=() if self._doing else (idle,),
        )

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

    @contextmanager
    def _busy(self, method: str) -> Iterator[None]:
        self._doing, self._since = method, time.time()
        try:
            yield
        finally:
            self._doing, self._since = "", time.time()


class ActorPeer(RankPeer):
    """Of the trainer; a class for each role, since Ray titles a process by its class."""

    role = "actor"


class ActorFwdPeer(RankPeer):
    role = "actor_fwd"


class ReferencePeer(RankPeer):
    role = "reference"

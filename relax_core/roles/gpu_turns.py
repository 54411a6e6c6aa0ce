"""Lets trainer and engines alternate on the GPUs that they share (``mode=colocate`` with engines on GPUs).

The trainer has its turn from the release of the engines' memory until its state is on the host again. An engine process
allocates its memory when it starts, so its owner waits until the trainer's turn ends. Both sides hold a lock on one
file of the run: the trainer alone, the owners of starting engines together. The kernel releases the lock of a process
that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from relax_core.config.schema import PlacementConfig
from relax_core.roles.process_placement import shares_gpus
from relax_core.roles.role_context import RunContext

POLL_S = 0.05
LOCK_FILE = "gpu-turn"


def visible_gpus(placement: PlacementConfig) -> tuple[str, ...]:
    """Returns the ids of the run's GPUs: from ``CUDA_VISIBLE_DEVICES``, or else numbers from 0.

    Call it in the controller, because Ray changes the variable in the processes of workers.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ids = [gpu.strip() for gpu in listed if gpu.strip()] or list(map(str, range(placement.gpus_per_node)))
    return tuple(ids[: placement.gpus_per_node])


def shared_gpus(context: RunContext, rank: int) -> tuple[str, ...]:
    """Returns the ids of the GPUs of engine ``rank`` if it shares them with the trainer, else ()."""
    tp = context.config.engine.tp
    return context.gpus[rank * tp : (rank + 1) * tp] if shares_gpus(context.config) else ()


class GpuTurn:
    """Holds a lock on the shared GPUs.

    ``file`` is the lock's file. ``waiting`` records a wait for a worker (`Worker.waiting`), and ``timeout_s`` is the
    longest wait, after which `begin` raises TimeoutError.
    """

    def __init__(self, file: Path, *, timeout_s: float, waiting: Callable[..., AbstractContextManager[None]]) -> None:
        self._file, self._timeout_s, self._waiting = file, timeout_s, waiting
        self._descriptor: int | None = None

    def begin(self, *, alone: bool, what: str, on: str) -> None:
        """Takes the lock, exclusively (``alone``) or shared; ``what`` and ``on`` describe the wait."""
        assert self._descriptor is None, "the turn has begun already"
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, what=what, on=on)
        except TimeoutError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def end(self) -> None:
        """Releases the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def held(self, *, alone: bool, what: str, on: str) -> Iterator[None]:
        """Holds the lock while the block runs."""
        self.begin(alone=alone, what=what, on=on)
        try:
            yield
        finally:
            self.end()

    def _lock(self, descriptor: int, kind: int, *, what: str, on: str) -> None:
        if _taken(descriptor, kind):
            return
        deadline = time.monotonic() + self._timeout_s
        with self._waiting(what, on=on):
            while not _taken(descriptor, kind):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: {on} has used the shared GPUs for {self._timeout_s:g} s")
                time.sleep(POLL_S)


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

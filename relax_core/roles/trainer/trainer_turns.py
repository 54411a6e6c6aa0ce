"""Lets the trainer alternate with the engines on the same memory (``mode=colocate``).

In the trainer's turn the engines have released the memory of their KV caches. On shared GPUs they have also released
the memory of their weights, and the trainer's state is on the device only in its turn. A turn on GPUs:

    begin               lock the GPUs, release the engines' memory, return the state to the device
                        (train)
    before_publication  move gradients and optimizer state to the host, give the engines memory for their weights
                        (publish: write the weights to host memory, from which the engines load them)
    end                 move the weights to the host, wait for the push, resume the KV caches, unlock the GPUs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax_core.roles.gpu_turns import GpuTurn
from relax_core.roles.trainer.weight_sync import WeightSync
from relax_core.roles.trainer.worker_group import TrainerWorkerGroup

BUILDING = "the end of an engine's start on the shared GPUs"


class TrainerTurns:
    """Begins and ends the trainer's turns.

    If ``offloads`` is True, the trainer's state is on the host between turns. ``gpus`` is the lock of shared GPUs, or
    None without shared GPUs; engines on shared GPUs also release their weights. ``end_push`` waits for the end of the
    newest push. Set ``worker_group`` as soon as the model is built.
    """

    worker_group: TrainerWorkerGroup | None = None

    def __init__(self, sync: WeightSync, *, offloads: bool, gpus: GpuTurn | None, end_push: Callable[[], None]) -> None:
        self._sync, self.offloads, self._gpus, self._end_push = sync, offloads, gpus, end_push
        self._begun = False

    def begin(self) -> None:
        """Begins a turn; does nothing within a turn."""
        if self._begun:
            return
        if self._gpus is not None:
            self._gpus.begin(alone=True, what=BUILDING, on="engine")
        self._sync.release_memory(weights=self._gpus is not None)
        if self.offloads and self.worker_group is not None:
            self.worker_group.onload()
        self._begun = True

    def before_publication(self) -> None:
        """Leaves only the trainer's weights on the device, and gives the engines memory for theirs."""
        if self.offloads and self.worker_group is not None:
            self.worker_group.offload_optimizer()
        if self._gpus is not None:
            self._sync.resume_weights()

    def end(self) -> None:
        """Ends the turn after the push of the newest weights."""
        if self.offloads and self.worker_group is not None:
            self.worker_group.offload()
        self._end_push()
        self._sync.resume_memory()
        if self._gpus is not None:
            self._gpus.end()
        self._begun = False

    @contextmanager
    def with_state(self) -> Iterator[None]:
        """Has the trainer's state on the device while the block runs: in a separate turn, if it is on the host.

        The engines then load the newest published weights again, from their owners.
        """
        if self._begun or not self.offloads:
            yield
            return
        self.begin()
        yield
        self.before_publication()
        self.end()

"""A gloo group of the trainer (rank 0) and engines, apart from torch's default group, for broadcasts of weights.

The stores' names are those that SGLang's and its trainers' ``init_custom_process_group`` come to, so either end may be
theirs.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from relax_core.weights.rendezvous import open_store


class WeightGroup:
    """One rank's end. A broadcast that waits longer than the group's deadline raises RuntimeError."""

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group = group

    @classmethod
    def join(cls, name: str, *, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> WeightGroup:
        """Waits for the others at ``address``:``port``, which rank 0 opens. Raises RuntimeError past ``timeout_s``."""
        store = open_store(address, port, rank=rank, world_size=world_size, timeout_s=timeout_s)
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        return cls(dist.ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=timeout_s)))

    def _broadcast(self, tensors: list[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        broadcast = self._group.broadcast  # type: ignore[attr-defined]  # torch's stubs lack it
        for work in [broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def send(self, tensors: list[Tensor]) -> None:
        """Rank 0's end of `receive`."""
        self._broadcast([tensor.contiguous() for tensor in tensors])

    def receive(self, tensors: list[Tensor]) -> None:
        """Fills ``tensors`` with rank 0's, in order."""
        self._broadcast(tensors)

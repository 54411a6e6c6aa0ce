"""A collective group of the trainer (rank 0) and one engine, apart from torch's default group, to send weights.

The stores' names are those that SGLang's and its trainers' ``init_custom_process_group`` come to, so either end may be
theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from relax_core.weights.rendezvous import open_store
from relax_core.weights.transports.base import WeightGroupAddress


class WeightGroup:
    """One rank's end. A broadcast that waits longer than the group's deadline raises RuntimeError."""

    def __init__(self, group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL, *, device: str) -> None:
        self._group = group
        self._device = device

    @classmethod
    def join(cls, place: WeightGroupAddress, *, rank: int, listener: socket.socket | None = None) -> WeightGroup:
        """Waits for the others. Raises RuntimeError past ``place.timeout_s``. ``listener``: rank 0's, already bound."""
        timeout = timedelta(seconds=place.timeout_s)
        store = open_store(
            place.address,
            place.port,
            rank=rank,
            world_size=place.world_size,
            timeout_s=place.timeout_s,
            listener=listener,
        )
        named = dist.PrefixStore(f"{place.name}/", dist.PrefixStore(place.name, store))
        if place.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", named), rank, place.world_size, options)
            return cls(nccl, device="cuda")
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", named), rank, place.world_size, timeout)
        return cls(gloo, device="cpu")

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        broadcast = self._group.broadcast  # type: ignore[union-attr]  # torch's stubs lack it
        for work in [broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's end of `receive`. Returns once the tensors may be let go."""
        self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors])
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()  # NCCL's wait() only orders the stream

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills ``tensors`` with rank 0's, in order."""
        self._broadcast(tensors)

    def abort(self) -> None:
        """Frees what NCCL still holds of a broadcast that will not end; gloo's ends at its own deadline."""
        self._group.abort()

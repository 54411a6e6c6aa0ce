"""Sends weights in a collective group of the trainer (rank 0) and one engine, apart from torch's default group.

The names in the stores are those of ``init_custom_process_group`` in SGLang and its trainers, so either end can be
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
    """Sends or receives as one rank of the group; a broadcast past the group's deadline raises RuntimeError."""

    def __init__(self, group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL, *, device: str) -> None:
        self._group = group
        self._device = device

    @classmethod
    def join(cls, address: WeightGroupAddress, *, rank: int, listener: socket.socket | None = None) -> WeightGroup:
        """Joins the group and waits for the other ranks.

        Raises RuntimeError after ``timeout_s`` seconds. ``listener`` is rank 0's socket if its port is already bound.
        """
        timeout = timedelta(seconds=address.timeout_s)
        store = open_store(
            address.address,
            address.port,
            rank=rank,
            world_size=address.world_size,
            timeout_s=address.timeout_s,
            listener=listener,
        )
        named = dist.PrefixStore(f"{address.name}/", dist.PrefixStore(address.name, store))
        if address.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", named), rank, address.world_size, options)
            return cls(nccl, device="cuda")
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", named), rank, address.world_size, timeout)
        return cls(gloo, device="cpu")

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        broadcast = self._group.broadcast  # type: ignore[union-attr]  # torch's stubs lack it
        for work in [broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors from rank 0 to `receive` on the other ranks; returns when they may be freed."""
        self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors])
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()  # NCCL's wait() only orders the stream.

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills ``tensors`` with those of rank 0, in order."""
        self._broadcast(tensors)

    def abort(self) -> None:
        """Frees what NCCL holds of a broadcast that does not end; a broadcast of gloo ends at its own deadline."""
        self._group.abort()

"""Moves a rank's training state between its device and host memory, for GPUs that trainer and engines share.

The unit is the storage, not the tensor. All tensors of the state (parameters in the wrapper's buffers, ``main_grad``,
the shards of the distributed optimizer, tied embeddings, the slices of `HfWeights` and `RankCheckpoint`) are views of a
few storages. A storage that is resized to 0 bytes and back keeps every view valid, so no view has to be replaced.
Megatron's own ``optimizer.offload_to_cpu`` replaces tensors instead, which separates the shards of a float32 model from
the buffer that they are views of.

While a storage is on the host, none of its views may be read: on a CPU the read would crash the process. Gradients are
not copied; they are 0 after their return.

A rank can also keep the run's initial weights on the host and exchange them with the trained weights, so that it
computes the reference's log-probs without a second model on its device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from relax_core.train.device import training_device
from relax_core.train.optimizer import optimizer_tensors

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "states"
EXCHANGE_BYTES = 64 << 20  # bytes that an exchange of weights needs on the device


class HostMemory:
    """Holds copies of the device's storages in host memory, which is pinned on CUDA.

    The memory of a storage is allocated at its first copy and used again. On CUDA the current stream copies, in order;
    synchronize before the host reads a copy. On ``meta`` a storage has only a size.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # the storage's address in C++ → its bytes on the device
        self._copies: dict[int, Tensor] = {}

    def save(self, storage: UntypedStorage) -> None:
        """Copies a storage to the host."""
        device = training_device()
        self._sizes[storage._cdata] = storage.nbytes()
        if device.meta:
            return
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.cuda)
        self._copies[storage._cdata].copy_(_bytes_of(storage), non_blocking=device.cuda)

    def restore(self, storage: UntypedStorage) -> None:
        """Allocates the storage's memory on the device, and copies its saved bytes there."""
        device = training_device()
        data = resized(storage, self._sizes[storage._cdata])
        if not device.meta:
            data.copy_(self._copies[storage._cdata], non_blocking=device.cuda)

    def exchange(self, storage: UntypedStorage) -> None:
        """Exchanges the bytes on the device and the saved bytes, in parts of `EXCHANGE_BYTES`."""
        device = training_device()
        if device.meta:
            return
        copy = self._copies[storage._cdata]
        for here, there in zip(_bytes_of(storage).split(EXCHANGE_BYTES), copy.split(EXCHANGE_BYTES), strict=True):
            before = here.clone()
            here.copy_(there, non_blocking=device.cuda)
            there.copy_(before, non_blocking=device.cuda)

    def at(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the device, or its view of the saved bytes if its storage has size 0."""
        storage = tensor.untyped_storage()
        if storage.nbytes() or not tensor.numel():
            return tensor
        copy = self._copies[storage._cdata].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


@dataclass(frozen=True, kw_only=True)
class _Offloaded:
    """Holds a storage of size 0, its size in bytes on the device, and whether the host has its bytes (else zeros)."""

    storage: UntypedStorage
    size: int
    saved: bool


class StateOffload:
    """Moves the parameters, gradients and optimizer state of a rank to the host and back, bit by bit.

    ``buffers`` are those of Megatron's data-parallel wrappers, and ``optimizer`` is None; both only exist in training.
    Optimizer states that `HostStates` keeps on the host stay there.
    """

    def __init__(self, models: Sequence[torch.nn.Module], *, buffers: Sequence[Any], optimizer: Any) -> None:
        self._models, self._buffers, self._optimizer = models, buffers, optimizer
        self._offloaded: list[_Offloaded] = []
        self._host = HostMemory()
        self._reference = HostMemory()
        self._trained: list[UntypedStorage] = []  # the storages that have reference weights on the host

    @property
    def on_device(self) -> bool:
        """Returns whether the whole state is on the device."""
        return not self._offloaded

    def offload(self, *, keep_weights: bool = False) -> int:
        """Frees the state's memory on the device, and returns the number of bytes that this call frees.

        With ``keep_weights`` the parameters stay, so that they can still be exported; another call then frees them.
        """
        device = training_device()
        moved = []
        for kind, storage in self._storages():
            if not storage.nbytes() or (keep_weights and kind == WEIGHTS):
                continue
            if kind != GRADIENTS:
                self._host.save(storage)
            moved.append(_Offloaded(storage=storage, size=storage.nbytes(), saved=kind != GRADIENTS))
        device.synchronize()  # the copies read the storages that are freed now
        for offloaded in moved:
            resized(offloaded.storage, 0)
        self._offloaded += moved
        if device.cuda:
            torch.cuda.empty_cache()
        return sum(offloaded.size for offloaded in moved)

    def onload(self) -> None:
        """Returns the state to the device; does nothing if it is there."""
        device = training_device()
        for offloaded in self._offloaded:
            if offloaded.saved:
                self._host.restore(offloaded.storage)
            else:
                resized(offloaded.storage, offloaded.size).zero_()
        device.synchronize()
        self._offloaded = []

    def keep_reference(self) -> None:
        """Copies the trained weights to the host as the weights of the reference. Frozen weights are the same in both.

        The copy needs as many bytes of host memory as the trained weights have on the device.
        """
        self._trained = list(self._distinct(self._trained_parameters()))
        for storage in self._trained:
            self._reference.save(storage)
        training_device().synchronize()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Has the reference's weights in the model while the block runs; the trained weights are then on the host."""
        assert self._trained, "keep_reference comes first"
        self._exchange_reference()
        try:
            yield
        finally:
            self._exchange_reference()

    def _exchange_reference(self) -> None:
        for storage in self._trained:
            self._reference.exchange(storage)
        training_device().synchronize()

    def _storages(self) -> Iterator[tuple[str, UntypedStorage]]:
        """Yields each storage of the state once, with its kind; a parameter that an optimizer updates is a weight."""
        seen: set[int] = set()
        for kind, tensors in ((WEIGHTS, self._parameters()), (GRADIENTS, self._gradients()), (STATES, self._states())):
            for storage in self._distinct(tensors, seen=seen):
                yield kind, storage

    @staticmethod
    def _distinct(tensors: Iterable[Tensor], *, seen: set[int] | None = None) -> Iterator[UntypedStorage]:
        """Yields the storages of tensors on the device, each once, without those that ``seen`` already has."""
        seen = set() if seen is None else seen
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == training_device().type and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _parameters(self) -> Iterator[Tensor]:
        yield from self._trained_parameters()
        for model in self._models:
            yield from (parameter.data for parameter in model.parameters())

    def _trained_parameters(self) -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in self._buffers if buffer.param_data is not None)
        for model in self._models:
            yield from (parameter.data for parameter in model.parameters() if parameter.requires_grad)

    def _gradients(self) -> Iterator[Tensor]:
        return (buffer.grad_data for buffer in self._buffers)

    def _states(self) -> Iterator[Tensor]:
        """Yields the master copies and moments of the optimizer; step counters stay."""
        if self._optimizer is not None:
            yield from (tensor for tensor in optimizer_tensors(self._optimizer) if tensor.dim())


def resized(storage: UntypedStorage, size: int) -> Tensor:
    """Resizes a storage to ``size`` bytes, and returns its bytes, with undefined values.

    A rehearsal observes operators, and the operator that makes the result shows the new size.
    """
    storage.resize_(size)
    return _bytes_of(storage)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Keeps an optimizer's master weights and Adam's moments in host memory (`optimizer.states=host`).

The update itself runs on the device, with the operators and the numbers of an update without this module. It runs over
buckets of parameters: the states of a bucket are copied to the device, updated, and copied back. Gradients and weights
stay on the device. Megatron's own offload updates on CPU cores instead, needs memory for the gradients on the host, and
depends on CUDA streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relax_core.train.device import training_device
from relax_core.train.optimizer import main_weights, optimizer_tensors, updating_optimizers
from relax_core.train.parallel_layout import UPDATE_BUCKET_ELEMENTS
from relax_core.train.state_offload import HostMemory, resized


class HostStates:
    """Keeps the states of ``optimizer`` on the host, except within an update.

    ``models`` are the chunks that the optimizer updates. A parameter that the optimizer updates itself, without a
    master copy, stays on the device. Between updates a state's storage on the device has size 0, and only `at` may read
    or write the state.
    """

    def __init__(self, optimizer: Any, models: Sequence[torch.nn.Module]) -> None:
        self._memory = HostMemory()
        parameters = [parameter for model in models for parameter in model.parameters()]
        self._weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        for wrapped in updating_optimizers(optimizer):
            copies = main_weights(wrapped, parameters)
            wrapped.optimizer.step = partial(self._update, wrapped.optimizer, wrapped.optimizer.step, copies)
            # Megatron copies between master weights and parameters when all master weights are on the device.
            wrapped._copy_main_params_to_model_params = _nothing
            wrapped._copy_model_params_to_main_params = partial(self._read_parameters, copies)
        self.keep(optimizer_tensors(optimizer))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Moves those of ``tensors`` that are states on the device to the host, where they can then be written."""
        self._move(tensors)
        training_device().synchronize()

    def _move(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Step counters have no axis. They stay, because the update reads them on the device.
            if tensor.dim() and storage.nbytes() and storage._cdata not in self._weights:
                self._memory.save(storage)
                resized(storage, 0)

    def at(self, tensor: Tensor) -> Tensor:
        """Returns a state's view of host memory, or the tensor itself if it is on the device.

        The view is valid until the next update.
        """
        return self._memory.at(tensor)

    def _update(self, optimizer: Any, step: Callable[[], object], copies: Mapping[Tensor, tuple[Tensor, int]]) -> None:
        """Runs ``step``, the update of ``optimizer``, over one bucket of parameters after the other.

        ``copies`` maps each master weight to its parameter and to its first element there.
        """
        groups = optimizer.param_groups
        try:
            for group in groups:
                stepped: dict[str, Any] = {}
                for bucket in buckets(group["params"]):
                    for state in _states(optimizer, bucket):
                        if not state.untyped_storage().nbytes():
                            self._memory.restore(state.untyped_storage())
                    # Some optimizers count updates in the group, so each bucket begins with the group's own counter.
                    stepped = {**group, "params": bucket}
                    optimizer.param_groups = [stepped]
                    step()
                    for main in bucket:
                        if main in copies:
                            _part(main, *copies[main]).copy_(main)
                    self._move(_states(optimizer, bucket))
                group.update({key: value for key, value in stepped.items() if key != "params"})
        finally:
            optimizer.param_groups = groups
        training_device().synchronize()  # the host may read the states

    def _read_parameters(self, copies: Mapping[Tensor, tuple[Tensor, int]], state_dict: None = None) -> None:
        """Sets the master weights to the parameters; Megatron's argument ``state_dict`` is not used."""
        for main, (parameter, start) in copies.items():
            self.at(main.detach()).copy_(_part(main, parameter, start))


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divides parameters into buckets of at most `UPDATE_BUCKET_ELEMENTS` elements, or of one larger parameter."""
    bucket: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        if bucket and elements + parameter.numel() > UPDATE_BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(parameter)
        elements += parameter.numel()
    if bucket:
        yield bucket


def _states(optimizer: Any, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the tensors of `optimizer_tensors` that belong to the parameters of a bucket."""
    for parameter in bucket:
        yield parameter.detach()
        yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))


def _part(main: Tensor, parameter: Tensor, start: int) -> Tensor:
    """Returns the part of a parameter that a master weight is the copy of, in the shape of the master weight."""
    return parameter.detach().view(-1)[start : start + main.numel()].view(main.shape)


def _nothing() -> None:
    """Replaces a copy that the update of a bucket has done."""

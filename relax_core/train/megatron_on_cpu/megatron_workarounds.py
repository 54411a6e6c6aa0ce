"""Works around what megatron-core 0.16.1 gets wrong without CUDA, as each module is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


def _disable_jit_fuser(jit: Any) -> None:
    """Turns off torch.compile, which takes tens of seconds on a CPU, before any module decorates with it."""
    jit.disable_jit_fuser()


def _cpu_rng_state(tensor_parallel_random: Any) -> None:
    """Makes the RNG tracker use the CPU's one generator; it addresses CUDA generators by index."""
    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(tensor_parallel_random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU" not in record.getMessage()
    )


def _uneven_splits(mappings: Any) -> None:
    """Pads uneven gathers of expert tensor parallelism, because gloo requires equally many tokens on each rank."""
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        tensor: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return gather(tensor, group, sizes, *args, **kwargs)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        tensor: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, sizes, *args, **kwargs)
        padded = tensor.new_zeros(len(sizes), max(sizes), *tensor.shape[1:])
        for row, part in zip(padded, tensor.split(sizes), strict=True):
            row[: len(part)] = part
        output = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(output, padded.flatten(0, 1), group=group)
        return output[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _disable_jit_fuser,
    "megatron.core.tensor_parallel.random": _cpu_rng_state,
    "megatron.core.tensor_parallel.mappings": _uneven_splits,
}


def apply(module: ModuleType) -> None:
    """Applies the workaround of a Megatron module that was just executed, if it has one."""
    workaround = _AFTER_IMPORT.get(module.__name__)
    if workaround is not None:
        workaround(module)

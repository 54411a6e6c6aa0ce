"""Joins this process to the trainer's ranks and sets up Megatron's groups, once a process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from relax_core.config.schema import ParallelConfig
from relax_core.train.device import has_cuda
from relax_core.train.layout import check_layout
from relax_core.weights.rendezvous import open_store


def join(
    parallel: ParallelConfig, *, rank: int, world_size: int, store_address: str, timeout_s: float, seed: int
) -> None:
    """Waits for all ranks, at most ``timeout_s`` seconds, then builds Megatron's groups and seeds its RNG streams.

    ``store_address``: "host:port" of the TCPStore that rank 0 hosts; port 0 will do for one rank. A second back end
    of a process joins nothing new: it must have the same rank and world size.
    """
    check_layout(parallel, world_size)
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size), "one layout a process"
        return
    host, port = store_address.rsplit(":", 1)
    try:
        store = open_store(host, int(port), rank=rank, world_size=world_size, timeout_s=timeout_s)
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"trainer rank {rank} waited {timeout_s:g} s at {store_address} for all {world_size} ranks: {error}"
        ) from error
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        distributed_timeout_minutes=timeout_s / 60,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)

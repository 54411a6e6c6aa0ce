"""Joins this process to the trainer's ranks and sets up Megatron's groups, once a process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from relax_core.config.schema import ParallelConfig
from relax_core.train.device import has_cuda
from relax_core.train.layout import check_layout


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
    if host.startswith("127.") or host == "localhost":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host name's address
    timeout = timedelta(seconds=timeout_s)
    listener = None
    if rank == 0:
        # Left alone the store listens on every interface, and it asks nobody for a token.
        server = socket.create_server((host, int(port)))
        port, listener = server.getsockname()[1], server.detach()
    try:
        store = dist.TCPStore(
            host, int(port), world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
        )
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"trainer rank {rank} waited {timeout_s:g} s at {store_address} for all {world_size} ranks: {error}"
        ) from error
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

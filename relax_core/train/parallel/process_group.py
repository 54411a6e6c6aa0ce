"""Joins this process to the trainer's ranks and sets up Megatron's groups, one layout at a time."""

from __future__ import annotations

import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from relax_core.config.schema import ParallelConfig
from relax_core.train.megatron_on_cpu.device_loader import has_cuda
from relax_core.train.parallel.gloo_device import share_gloo_device
from relax_core.train.parallel.layout_arithmetic import check_layout
from relax_core.weights.rendezvous import keep_gloo_on_loopback, open_rank_store

_store: dist.Store | None = None  # It is kept after `leave`, because the next layout joins through it again.
_layouts = 0  # the number of layouts that this process has joined
_gloo_world: dist.ProcessGroup | None = None


def join(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    store_address: str,
    timeout_s: float,
    seed: int,
    token: str = "",
) -> None:
    """Waits up to ``timeout_s`` seconds for all ranks, builds Megatron's groups and seeds its random streams.

    ``store_address`` and ``token`` are those of `open_rank_store`; a single rank uses neither. If the process has
    joined already, a second back end must have the same rank, world size and layout, unless all ranks `leave` first.
    Raises TimeoutError if some ranks do not arrive, and `ForeignRank` if another user connects in the place of a rank.
    """
    global _store, _layouts, _gloo_world
    check_layout(parallel, world_size)
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size), "a process has one layout at a time"
        assert _sizes() == _wanted(parallel), "a process has one layout at a time; all ranks must leave it first"
        return
    if _store is None and world_size == 1:
        keep_gloo_on_loopback()
        _store = dist.HashStore()  # in memory: nothing listens
    elif _store is None:
        _store = open_rank_store(store_address, token=token, rank=rank, world_size=world_size, timeout_s=timeout_s)
    _layouts += 1
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    share_gloo_device(token=token)
    prefixed = dist.PrefixStore(f"layout-{_layouts}", _store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    _gloo_world = dist.new_group(backend="gloo", timeout=timeout) if has_cuda() else dist.group.WORLD
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    random.seed(seed)  # Relax draws nothing from Python's and numpy's streams, but a plug-in may.
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave() -> None:
    """Destroys all groups, so that the same ranks can join in another layout.

    All ranks call it. Back ends that were built before cannot be used after it.
    """
    global _gloo_world
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    _gloo_world = None


def world_group() -> dist.ProcessGroup:
    """Returns a gloo group of all ranks, for tensors on the host."""
    assert _gloo_world is not None, "call join first"
    return _gloo_world


def wait_for_ranks(doing: str, *, rank: int, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks of ``group``, a gloo group, which is `world_group` by default.

    If ranks do not arrive within ``timeout_s`` seconds it raises RuntimeError, which begins with ``doing`` and names
    them; a plain collective would only time out. Of a rank that ended before the call, gloo may name the address alone.
    """
    try:
        barrier_group = world_group() if group is None else group
        dist.monitored_barrier(barrier_group, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"{doing}: trainer rank {rank} waited up to {timeout_s:g} s for the other ranks: {error}"
        ) from error


def most_over_ranks(number: int) -> int:
    """Returns the largest ``number`` of any rank; all ranks call it."""
    most = torch.tensor(number)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world_group())
    return int(most)


def _wanted(parallel: ParallelConfig) -> tuple[int, ...]:
    return parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.ep, parallel.etp


def _sizes() -> tuple[int, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )

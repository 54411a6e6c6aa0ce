"""Joins this process to the trainer's ranks and sets up Megatron's groups, one layout at a time.

All gloo groups of a process share one device, and with it one thread that waits for the network. By default torch gives
each group its own device, whose thread wakes up a hundred times a second. Megatron makes some twenty groups, also for a
single rank; their threads took 2% of a core while nothing happened, and 8% of a busy trainer's time.

A device listens on a TCP port without authentication. A connection takes the place of a rank if it names the number of
a pair of ranks, which is small, and torch unpickles data from ranks. The device therefore drops all connection
requests, except while the ranks of a group connect. Each group then checks the users of its connections on this host.
Before the group carries data, each rank proves to every other rank that it knows the run's token. Some kernels let only
root drop connection requests (seen on 6.18 in a virtual machine); there the checks of user and token remain.
"""

from __future__ import annotations

import hmac
import logging
import os
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroupGloo, distributed_c10d

from relax_core.config.schema import ParallelConfig
from relax_core.contracts.host_network import (
    GLOO_INTERFACES,
    Client,
    admit_clients,
    clients,
    is_loopback,
    listeners,
    missing_interface,
    refuse_clients,
)
from relax_core.train.device import training_device
from relax_core.train.parallel_layout import check_layout
from relax_core.weights.weight_group import keep_gloo_on_loopback, open_rank_store

log = logging.getLogger(__name__)
WITHOUT_RANKS = "without_ranks"  # The back end of a rehearsal's groups (relax_core/train/rehearsal/stand_ins.py).
_READS = 5  # reads of the kernel's table before a client is treated as foreign
_NUMBER_BYTES = 32  # the size of a proof


class UntrustedRank(RuntimeError):
    """Reports that a process of another user, or without the run's token, has connected in the place of a rank."""


class OneDeviceGloo(ProcessGroupGloo):
    """Makes a gloo group use the devices of this process, which all such groups share."""

    _devices: list[ProcessGroupGloo.Device] = []
    _listeners: dict[int, int] = {}  # the devices' TCP ports, with the descriptors of their sockets
    _token = ""
    _admits = 0  # the number of open blocks of `admitting_ranks`
    _filters = True  # False once the kernel has refused to drop connection requests for this user

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if not self._devices:
            known_ports = set(listeners())
            names = os.environ.get(GLOO_INTERFACES, "")
            if names and (problem := missing_interface(names)) is not None:
                raise ValueError(problem)
            self._devices.extend(
                [self.create_device(interface=name) for name in names.split(",")]
                if names
                else [self.create_default_device()]
            )
            # Once for a process: the kernel takes up to 30 ms to list its sockets.
            self._listeners.update(
                (port, listener) for port, listener in listeners().items() if port not in known_ports
            )
            _admit(self._admits > 0)
        torch_class: Any = ProcessGroupGloo  # torch's type annotations lack these options
        options = torch_class._Options()
        options._devices, options._timeout = self._devices, timeout
        if size == 1:
            super().__init__(store, rank, size, options)
            return
        # Other ranks connect after this rank has published its address in the store, so it already admits them.
        with admitting_ranks():
            super().__init__(store, rank, size, options)
        check_clients(set(self._listeners))
        self._prove_ranks(rank, size, timeout)

    def _prove_ranks(self, rank: int, size: int, timeout: timedelta) -> None:
        """Exchanges proofs of the token with every other rank, each over new random numbers of both ranks."""
        other_ranks = [other_rank for other_rank in range(size) if other_rank != rank]
        numbers = {other_rank: secrets.token_bytes(_NUMBER_BYTES) for other_rank in other_ranks}
        received = self._exchange(numbers, timeout)
        proofs = {
            other_rank: self._proof(rank, other_rank, received[other_rank] + numbers[other_rank])
            for other_rank in other_ranks
        }
        for other_rank, proof in self._exchange(proofs, timeout).items():
            if not hmac.compare_digest(
                proof, self._proof(other_rank, rank, numbers[other_rank] + received[other_rank])
            ):
                raise UntrustedRank(f"rank {other_rank} of a gloo group of {size} ranks does not know the run's token")

    def _proof(self, sender: int, receiver: int, numbers: bytes) -> bytes:
        return hmac.digest(self._token.encode(), b"gloo %d %d " % (sender, receiver) + numbers, "sha256")

    def _exchange(self, sent: dict[int, bytes], timeout: timedelta) -> dict[int, bytes]:
        group: Any = self  # torch's type annotations lack send and recv
        received = {other_rank: torch.zeros(_NUMBER_BYTES, dtype=torch.uint8) for other_rank in sent}
        works = [
            group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], other_rank, 0)
            for other_rank, data in sent.items()
        ]
        works += [group.recv([data], other_rank, 0) for other_rank, data in received.items()]
        for work in works:
            work.wait(timeout)
        return {other_rank: data.numpy().tobytes() for other_rank, data in received.items()}


def share_gloo_device(*, token: str) -> None:
    """Makes torch build `OneDeviceGloo` for each later gloo group, because there is no public way to choose a device.

    All ranks have the same ``token``.
    """
    OneDeviceGloo._token = token
    assert distributed_c10d.ProcessGroupGloo in (ProcessGroupGloo, OneDeviceGloo), "torch's own class is replaced"
    distributed_c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]


@contextmanager
def admitting_ranks() -> Iterator[None]:
    """Lets other ranks connect to this process while the block runs."""
    OneDeviceGloo._admits += 1
    _admit(True)
    try:
        yield
    finally:
        OneDeviceGloo._admits -= 1
        _admit(OneDeviceGloo._admits > 0)


def _admit(admits: bool) -> None:
    if not OneDeviceGloo._filters:
        return
    for descriptor in OneDeviceGloo._listeners.values():
        try:
            (admit_clients if admits else refuse_clients)(descriptor)
        except PermissionError as error:
            OneDeviceGloo._filters = False
            log.warning(
                "the kernel does not let this user drop connection requests to gloo (%s); users of this machine could "
                "delay the start of ranks, but not join them",
                error.strerror,
            )
            return


def check_clients(ports: set[int]) -> None:
    """Raises `UntrustedRank` unless all clients on this host of these ports belong to this user.

    A client that has already closed its end has no user, but its data could still be read.
    """
    for port in ports:
        foreign = _untrusted_clients(port)
        for _ in range(_READS - 1):
            if foreign:
                foreign &= _untrusted_clients(port)
        for client in foreign:
            user = "that has gone" if client.uid is None else f"of user {client.uid}"
            raise UntrustedRank(
                f"a process {user} connected to port {port}, at which the trainer's ranks find each other. Its data "
                "was not read. Ask that user to stop, or use a machine without other users."
            )


def _untrusted_clients(port: int) -> set[Client]:
    return {
        client
        for client in clients(port)
        if client.uid != os.getuid() and (client.uid is not None or is_loopback(client))
    }


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

    For ``store_address`` and ``token`` see `open_rank_store`; a single rank uses neither. If the process has joined
    already, a second back end must have the same rank, world size and layout, unless all ranks `leave` first. Raises
    TimeoutError if some ranks do not arrive, and `UntrustedRank` if another user connects in the place of a rank.
    """
    global _store, _layouts, _gloo_world
    check_layout(parallel, world_size)
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size), "a process has one layout at a time"
        assert _sizes() == _wanted(parallel), "a process has one layout at a time; all ranks must leave it first"
        return
    rehearses = training_device().meta
    if _store is None and (world_size == 1 or rehearses):
        keep_gloo_on_loopback()
        _store = dist.HashStore()  # in memory: nothing listens
    elif _store is None:
        _store = open_rank_store(store_address, token=token, rank=rank, world_size=world_size, timeout_s=timeout_s)
    _layouts += 1
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if training_device().cuda else WITHOUT_RANKS if rehearses else "gloo"
    if not rehearses:
        share_gloo_device(token=token)
    prefixed = dist.PrefixStore(f"layout-{_layouts}", _store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    _gloo_world = dist.new_group(backend="gloo", timeout=timeout) if training_device().cuda else dist.group.WORLD
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=not rehearses,
    )
    random.seed(seed)  # Relax draws nothing from Python's and numpy's streams, but a plug-in may.
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave() -> None:
    """Destroys all groups; then the same ranks can join in another layout.

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


def new_world_group(*, timeout_s: float) -> dist.ProcessGroup:
    """Returns a further gloo group of all ranks, with collectives that do not mix with others; all ranks call it."""
    backend = WITHOUT_RANKS if training_device().meta else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def wait_for_ranks(doing: str, *, rank: int, timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks of ``group``, a gloo group, which is `world_group` by default.

    If ranks do not arrive within ``timeout_s`` seconds it raises RuntimeError, which begins with ``doing`` and names
    them; a plain collective would only time out. For a rank that ended before the call, gloo may name only an address.
    """
    if training_device().meta:
        return  # In a rehearsal there are no other ranks.
    try:
        barrier_group = world_group() if group is None else group
        dist.monitored_barrier(barrier_group, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"{doing}: trainer rank {rank} waited up to {timeout_s:g} s for the other ranks: {error}"
        ) from error


def max_over_ranks(number: int) -> int:
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

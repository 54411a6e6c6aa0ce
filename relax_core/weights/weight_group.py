"""Sends weights in a collective group of the trainer (rank 0) and one engine, apart from torch's default group.

The names in the stores follow ``init_custom_process_group`` in SGLang and its trainers, so that either side can be
SGLang or such a trainer. torch's TCPStore has no authentication: any client can join as a rank, and read and change
every key. The ranks of the trainer therefore find each other through a file in a private folder if they are on one
host, and through a `SignedStore` if they are on several.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from relax_core.contracts.host_network import GLOO_INTERFACES
from relax_core.weights.transports import WeightGroupAddress


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
        """Fills ``tensors`` with rank 0's tensors, in order."""
        self._broadcast(tensors)

    def abort(self) -> None:
        """Frees NCCL's resources of a broadcast that does not end; a gloo broadcast ends at its own deadline."""
        self._group.abort()


LOOPBACK_PREFIX = "127."
POLL_S = 0.01
_ARRIVED = "arrived"
_DIGEST_BYTES = 32


def open_store(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None = None
) -> dist.TCPStore:
    """Joins the TCPStore that rank 0 opens at ``host``:``port`` and returns when all ranks have joined.

    A single rank may use port 0. ``listener`` is rank 0's socket if its port is already bound, and the store owns it
    from then on. On a loopback host the gloo groups of this process also stay on loopback. Raises torch's
    DistStoreError after ``timeout_s`` seconds, and OSError if rank 0 cannot listen.
    """
    return _tcp_store(
        host, port, rank=rank, world_size=world_size, timeout_s=timeout_s, listener=listener, waits_for_ranks=True
    )


def open_rank_store(address: str, *, token: str, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Joins the store of the trainer's ranks and returns when all ranks have joined.

    ``address`` is the path of a new file in a folder of this user alone, or "host:port", at which rank 0 then opens a
    `SignedStore` with the run's ``token``. Raises TimeoutError after ``timeout_s`` seconds, and earlier if rank 0
    closes the store, because it gave up or died.
    """
    start = time.monotonic()

    def late(why: str, *, waited_s: float = timeout_s) -> TimeoutError:
        return TimeoutError(f"trainer rank {rank} waited {waited_s:g} s at {address} for all {world_size} ranks: {why}")

    store: dist.Store
    if address.startswith("/"):
        keep_gloo_on_loopback()
        store = dist.FileStore(address, world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
    else:
        host, port = address.rsplit(":", 1)
        try:
            inner = _tcp_store(
                host, int(port), rank=rank, world_size=world_size, timeout_s=timeout_s, waits_for_ranks=False
            )
        except dist.DistStoreError as error:
            raise late(str(error)) from error
        store = SignedStore(inner, key=f"{address}\n{token}".encode())
    try:
        arrived = store.add(_ARRIVED, 1)
        while arrived < world_size:
            if time.monotonic() > start + timeout_s:
                raise late(f"{arrived} have joined")
            time.sleep(POLL_S)
            arrived = store.add(_ARRIVED, 0)
    except dist.DistNetworkError as error:
        raise late("rank 0 closed the store", waited_s=round(time.monotonic() - start, 1)) from error
    return store


def _tcp_store(
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    waits_for_ranks: bool,
    listener: socket.socket | None = None,
) -> dist.TCPStore:
    if host.startswith(LOOPBACK_PREFIX) or host == "localhost":
        keep_gloo_on_loopback()
    descriptor = None
    if rank == 0:
        # By default the store listens on every interface.
        server = listener or socket.create_server((host, port))
        port, descriptor = server.getsockname()[1], server.detach()
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=waits_for_ranks,
        master_listen_fd=descriptor,
    )


def keep_gloo_on_loopback() -> None:
    """Makes the gloo groups of this process listen on loopback, unless the user has named an interface."""
    os.environ.setdefault(GLOO_INTERFACES, "lo")  # By default gloo listens on the host name's address.


class SignedStore(dist.Store):
    """Signs the values of a store, and hides the names of its keys, with a ``key`` that the ranks share.

    Names are keyed hashes (HMAC-SHA256), so that other clients cannot name a key. Each value is followed by the keyed
    hash of its name and itself. Counters have no hash: their values are numbers under hidden names.
    """

    def __init__(self, inner: dist.Store, *, key: bytes) -> None:
        super().__init__()
        self._inner = inner
        self._key = key

    def _hash(self, *parts: bytes) -> bytes:
        return hmac.new(self._key, b"\n".join(parts), hashlib.sha256).digest()

    def _name(self, key: str) -> str:
        return self._hash(b"name", key.encode()).hex()

    def _signed(self, name: str, value: str | bytes) -> bytes:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        return plain + self._hash(b"value", name.encode(), plain)

    def _verified(self, name: str, value: bytes) -> bytes:
        plain, digest = value[:-_DIGEST_BYTES], value[-_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._hash(b"value", name.encode(), plain)):
            raise RuntimeError("a value in the store of the ranks was not written by a rank of this run")
        return plain

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        name = self._name(key)
        self._inner.set(name, self._signed(name, value))  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str) -> bytes:
        """Returns the value of a key and waits for it. Raises RuntimeError for a value without the ranks' signature."""
        name = self._name(key)
        return self._verified(name, self._inner.get(name))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""
        return self._inner.add(self._name(key), amount)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are set."""
        return self._inner.check([self._name(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        names = [self._name(key) for key in keys]
        if timeout is None:
            self._inner.wait(names)
        else:
            self._inner.wait(names, timeout)

    def delete_key(self, key: str) -> bool:
        """Deletes a key and returns whether it was set."""
        return self._inner.delete_key(self._name(key))

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` and `wait` wait."""
        self._inner.set_timeout(timeout)

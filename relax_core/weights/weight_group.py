"""Sends weights in a collective group of the trainer (rank 0) and one engine, separate from torch's default group.

The names in the stores follow SGLang's ``init_custom_process_group``, so a group can contain an SGLang server. torch's
TCPStore has no authentication: any client can join as a rank, and read and change every key. Therefore the trainer's
ranks connect through a file in a private folder on one host, and through a `SignedStore` on several hosts.
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
    """Represents one rank of a group. A broadcast that exceeds the group's deadline raises RuntimeError."""

    def __init__(self, group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL, *, device: str) -> None:
        self._group = group
        self._device = device

    @classmethod
    def join(cls, address: WeightGroupAddress, *, rank: int, listener: socket.socket | None = None) -> WeightGroup:
        """Joins the group and waits for the other ranks.

        ``listener`` is rank 0's listening socket, if it exists already. Raises RuntimeError after ``timeout_s``
        seconds.
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
        broadcast = self._group.broadcast  # type: ignore[union-attr]  # torch's stubs lack this method
        for work in [broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors from rank 0 to the other ranks, which call `receive`; returns when the tensors may be freed."""
        self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors])
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()  # NCCL's wait() returns before the transfer ends.

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills ``tensors`` with rank 0's tensors, in order."""
        self._broadcast(tensors)

    def abort(self) -> None:
        """Frees the resources of a hanging NCCL broadcast. A gloo broadcast ends at its deadline without this call."""
        self._group.abort()


LOOPBACK_PREFIX = "127."
POLL_S = 0.01
_ARRIVED = "arrived"
_DIGEST_BYTES = 32


def open_store(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None = None
) -> dist.TCPStore:
    """Joins the TCPStore that rank 0 opens at ``host``:``port`` and returns when all ranks have joined.

    Port 0 is allowed for a single rank. ``listener`` is rank 0's listening socket, if it exists already; the store then
    owns it. If ``host`` is a loopback address, this process's gloo groups also use loopback only. Raises torch's
    DistStoreError after ``timeout_s`` seconds, and OSError if rank 0 cannot listen.
    """
    return _tcp_store(
        host, port, rank=rank, world_size=world_size, timeout_s=timeout_s, listener=listener, waits_for_ranks=True
    )


def open_rank_store(address: str, *, token: str, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Joins the store of the trainer's ranks and returns when all ranks have joined.

    ``address`` is the path of a new file in a private folder, or "host:port". At "host:port", rank 0 opens a
    `SignedStore` with the run's ``token``. Raises TimeoutError after ``timeout_s`` seconds, or as soon as rank 0 has
    given up or died and the store is closed.
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
        # Without a given socket, the store would listen on every interface.
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
    """Makes the gloo groups of this process listen on loopback only, unless the user has set an interface."""
    os.environ.setdefault(GLOO_INTERFACES, "lo")  # By default gloo listens on the address of the host's name.


class SignedStore(dist.Store):
    """Wraps a store: signs its values and hides its key names with a secret ``key`` that the ranks share.

    Each key name is replaced by its keyed hash (HMAC-SHA256), so other clients cannot address a key. A keyed hash of
    name and value is appended to each value. Counters are plain numbers without a hash; only their names are hidden.
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
        self._inner.set(name, self._signed(name, value))  # type: ignore[arg-type]  # bytes are accepted

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value. Raises RuntimeError for a value without the ranks' signature."""
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

"""Transfers published weight versions to engines: the transports, and the interfaces that each side implements.

The collective transport sends over gloo or NCCL in a separate group for each engine, so that a dead engine delays no
other engine.

In one group of all engines, gloo broadcasts along a tree: if an engine is killed during a broadcast, the ranks below it
and the sender wait for the whole deadline. With separate groups the trainer sends once for each engine.

The trainer sends the published file and not its parameters, because the next step may change the parameters meanwhile.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from relax_core.contracts.engine import EngineError, EngineUnreachable, TensorSpec, WeightManifest

if TYPE_CHECKING:
    from relax_core.weights.weight_group import WeightGroup


@dataclass(frozen=True, kw_only=True)
class WeightGroupAddress:
    """Describes where the ranks of a collective group find each other.

    The sender is rank 0 and opens ``address``:``port``. ``backend`` is gloo or nccl. Every wait for other ranks or a
    broadcast takes at most ``timeout_s`` seconds.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    timeout_s: float


class WeightReceiver(Protocol):
    """Describes the client of an engine that receives weights.

    Every call has a deadline. It raises EngineError, or EngineUnreachable if the engine does not answer.
    ``group_ranks`` is the number of the engine's processes that join a group. The calls that activate a version,
    `update_weights`, `update_weights_from_disk` and `end_weight_update`, answer with ``stall_ms``, the milliseconds for
    which decoding stopped. Samples in progress continue under the new version.
    """

    url: str
    group_ranks: int

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Makes the engine read the published file."""

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """Makes the engine load the published file's folder as a Hugging Face model."""

    def join_weight_group(self, address: WeightGroupAddress) -> dict[str, Any]:
        """Makes the engine join as ranks 1 to ``group_ranks``; returns when all of them have joined."""

    def leave_weight_group(self, name: str) -> dict[str, Any]:
        """Makes the engine leave a group."""

    def begin_weight_update(self) -> dict[str, Any]:
        """Begins an update in which the engine receives broadcasts."""

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Makes the engine receive one broadcast of bytes, which holds ``tensors`` one after the other."""

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends an update that has failed; an engine that loads weights as they arrive then serves nothing."""

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Makes the engine serve the received weights if their digest is ``digest``; otherwise it refuses them."""


class WeightTransport(Protocol):
    """Transfers versions to engines; calls for different receivers may run at the same time.

    ``by_file`` is True if engines read the published files themselves; a version may then have several files.
    """

    by_file: bool

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's answer when it serves the version; raises EngineError if it does not."""

    def forget(self, url: str) -> None:
        """Releases the transport's resources for an engine that has left; no push to it is in progress."""

    def close(self) -> None:
        """Releases the transport's resources."""


T = TypeVar("T")
GRACE_S = 5.0  # Seconds that the trainer's side of a collective may take after the engine's side is done.


class CollectiveTransport:
    """Sends versions over a group with each engine; a group is used until a broadcast fails or its engine restarts.

    ``host`` is this process's address as engines reach it. ``timeout_s`` bounds each join and each broadcast.
    """

    by_file = False

    def __init__(self, backend: Literal["gloo", "nccl"], *, host: str, timeout_s: float) -> None:
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[str, WeightGroup]] = {}  # engine url → the group and its name

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Sends the version and returns the engine's answer when it serves it."""
        assert manifest.frozen is None, "all tensors of a version are sent"
        had_group = receiver.url in self._groups
        try:
            self._send(receiver, manifest)
        except EngineUnreachable:
            raise
        except EngineError:
            if not had_group:
                raise
            self._send(receiver, manifest)  # The engine was restarted, and its new process is in no group.
        return receiver.end_weight_update(version=manifest.version, digest=manifest.digest)

    def forget(self, url: str) -> None:
        """Ends this process's side of the group with an engine that has left."""
        _, group = self._groups.pop(url, (None, None))
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Ends this process's side of the groups; an engine's side ends with its process."""
        for _, group in self._groups.values():
            group.abort()
        self._groups.clear()

    def _send(self, receiver: WeightReceiver, manifest: WeightManifest) -> None:
        from relax_core.weights.version_file import view_bytes

        receiver.begin_weight_update()
        try:
            name, group = self._groups.get(receiver.url) or self._join(receiver)
            data = view_bytes(manifest)
            for bucket in buckets(manifest):
                start, end = bucket[0].offset, bucket[-1].offset + bucket[-1].nbytes
                sent = _in_thread(lambda start=start, end=end: group.send([data[start:end]]))  # type: ignore[misc]
                receiver.receive_weights(bucket, group=name, version=manifest.version)
                _own_result(sent, receiver.url, f"group {name}: broadcast")
        except EngineError as error:
            self._leave(receiver, unreachable=isinstance(error, EngineUnreachable))
            raise

    def _join(self, receiver: WeightReceiver) -> tuple[str, WeightGroup]:
        from relax_core.weights.weight_group import WeightGroup

        listener = socket.create_server((self._host, 0))
        address = WeightGroupAddress(
            name=f"relax-{secrets.token_hex(8)}",
            address=self._host,
            port=listener.getsockname()[1],
            world_size=1 + receiver.group_ranks,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        joined = _in_thread(lambda: WeightGroup.join(address, rank=0, listener=listener))
        receiver.join_weight_group(address)
        own_end = _own_result(joined, receiver.url, f"group {address.name}: joining")
        self._groups[receiver.url] = address.name, own_end
        return self._groups[receiver.url]

    def _leave(self, receiver: WeightReceiver, *, unreachable: bool) -> None:
        """Leaves the group with an engine and ends the update there, unless the engine is unreachable.

        A broadcast in progress ends at its own deadline, in a thread for which nothing waits.
        """
        name, group = self._groups.pop(receiver.url, (None, None))
        if group is not None:
            group.abort()
        if unreachable:
            return
        if name is not None:
            with suppress(EngineError):  # A new process does not know the group.
                receiver.leave_weight_group(name)
        receiver.abandon_weight_update()


def buckets(manifest: WeightManifest) -> Iterator[Sequence[TensorSpec]]:
    """Yields the tensors in order in buckets of at most ``bucket_bytes`` bytes, or of one tensor that is larger."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in manifest.tensors:
        if bucket and size + spec.nbytes > manifest.bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.nbytes
    if bucket:
        yield bucket


def _in_thread(action: Callable[[], T]) -> Future[T]:
    """Runs ``action`` in a daemon thread, because with a dead engine it hangs until the group's deadline."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # The reader of the future gets the exception.
            future.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def _own_result(future: Future[T], url: str, what: str) -> T:
    """Returns the result of the trainer's side after the engine's side is done."""
    try:
        return future.result(timeout=GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(f"engine {url}: {what} did not end in the trainer: {error}") from error


class SharedMemoryTransport:
    """Makes the engine map the published file, which is in this host's memory, and compare each bucket's digest."""

    by_file = True

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's answer when it serves the version."""
        return receiver.update_weights(manifest)

    def forget(self, url: str) -> None:
        """Does nothing, because nothing is held for one engine."""

    def close(self) -> None:
        """Does nothing."""


class DiskTransport:
    """Makes the engine load the published folder; the trainer and the engine must see it under the same path.

    An external SGLang server loads it through SGLang's own route; other engines load it as from shared memory.
    """

    by_file = True

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's answer when it serves the version."""
        return receiver.update_weights_from_disk(manifest)

    def forget(self, url: str) -> None:
        """Does nothing, because nothing is held for one engine."""

    def close(self) -> None:
        """Does nothing."""

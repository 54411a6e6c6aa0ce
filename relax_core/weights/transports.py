"""Transfers published weight versions to engines: the transports, and the interfaces of transport and engine client.

The collective transport sends over gloo or NCCL. Each engine has a separate group, so a dead engine does not delay the
other engines.

With one group for all engines, gloo would broadcast along a tree. If an engine were killed during a broadcast, the
ranks below this engine and the sender would wait until the deadline. The cost of separate groups is that the trainer
sends each version once for each engine.

The trainer sends the published file. It does not send its parameters, because the next step may change them during the
transfer.
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
    """Describes the address at which the ranks of a collective group connect.

    Rank 0 is the sender and opens ``address``:``port``. ``backend`` is gloo or nccl. ``timeout_s`` limits each wait for
    other ranks or for a broadcast, in seconds.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    timeout_s: float


class WeightReceiver(Protocol):
    """Declares the calls of an engine client that transfer weights.

    Each call has a deadline. It raises EngineError, or EngineUnreachable if the engine does not answer. ``group_ranks``
    is the number of ranks with which the engine joins a group. `update_weights`, `update_weights_from_disk` and
    `end_weight_update` activate a version; their replies contain ``stall_ms``, the time in milliseconds for which
    decoding stopped. Samples in progress continue under the new version.
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
        """Makes the engine receive one broadcast: the concatenated bytes of ``tensors``."""

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends a failed update. An engine that has loaded a part of the weights then serves nothing."""

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Makes the engine serve the received weights. The engine refuses if their digest differs from ``digest``."""


class WeightTransport(Protocol):
    """Transfers versions to engines; calls for different receivers may run at the same time.

    ``by_file`` is True if the engines read the published files. Only then may a version have several files.
    """

    by_file: bool

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's reply once the engine serves the version; raises EngineError if it refuses."""

    def forget(self, url: str) -> None:
        """Releases the transport's resources for an engine that has left. No push to this engine may be in progress."""

    def close(self) -> None:
        """Releases the transport's resources."""


T = TypeVar("T")
GRACE_S = 5.0  # Maximum seconds from the engine's end of a collective call to the trainer's end.


class CollectiveTransport:
    """Sends versions in one group per engine. A group is used until a broadcast fails or its engine restarts.

    ``host`` is the address at which engines reach this process. ``timeout_s`` is the deadline of each join and each
    broadcast.
    """

    by_file = False

    def __init__(self, backend: Literal["gloo", "nccl"], *, host: str, timeout_s: float) -> None:
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[str, WeightGroup]] = {}  # engine url → (name of the group, group)

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Sends the version and returns the engine's reply once the engine serves the version."""
        assert manifest.frozen is None, "all tensors of a version are sent"
        had_group = receiver.url in self._groups
        try:
            self._send(receiver, manifest)
        except EngineUnreachable:
            raise
        except EngineError:
            if not had_group:
                raise
            self._send(receiver, manifest)  # The engine was restarted; its new process must join a new group.
        return receiver.end_weight_update(version=manifest.version, digest=manifest.digest)

    def forget(self, url: str) -> None:
        """Ends this process's side of the group with an engine that has left."""
        _, group = self._groups.pop(url, (None, None))
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Ends this process's side of all groups. The engine's side of a group ends with the engine's process."""
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
        """Leaves the group with an engine and, if the engine is reachable, makes the engine abandon the update.

        A broadcast in progress ends at its deadline in a background thread.
        """
        name, group = self._groups.pop(receiver.url, (None, None))
        if group is not None:
            group.abort()
        if unreachable:
            return
        if name is not None:
            with suppress(EngineError):  # A restarted engine does not know the group.
                receiver.leave_weight_group(name)
        receiver.abandon_weight_update()


def buckets(manifest: WeightManifest) -> Iterator[Sequence[TensorSpec]]:
    """Yields buckets of consecutive tensors: at most ``bucket_bytes`` bytes, or a single larger tensor."""
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
    """Runs ``action`` in a daemon thread, because ``action`` hangs until the group's deadline if the engine is dead."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # The future raises the exception when its result is read.
            future.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def _own_result(future: Future[T], url: str, what: str) -> T:
    """Returns the trainer's result of a collective call after the engine's call has returned."""
    try:
        return future.result(timeout=GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(f"engine {url}: {what} did not end in the trainer: {error}") from error


class SharedMemoryTransport:
    """Makes the engine map the published file in this host's shared memory and compare the digest of each bucket."""

    by_file = True

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's reply once the engine serves the version."""
        return receiver.update_weights(manifest)

    def forget(self, url: str) -> None:
        """Does nothing, because this transport has no resources per engine."""

    def close(self) -> None:
        """Does nothing."""


class DiskTransport:
    """Makes the engine load the published folder, which must have the same path for trainer and engine.

    An external SGLang server loads the folder through SGLang's own route. All other engines map the file, as with
    `SharedMemoryTransport`.
    """

    by_file = True

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's reply once the engine serves the version."""
        return receiver.update_weights_from_disk(manifest)

    def forget(self, url: str) -> None:
        """Does nothing, because this transport has no resources per engine."""

    def close(self) -> None:
        """Does nothing."""

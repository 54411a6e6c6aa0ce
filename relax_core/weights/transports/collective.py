"""Weights over gloo or NCCL: a group of the trainer and ONE engine each, so that a dead engine holds up nobody else.

In one group of all, gloo's broadcast is a tree: with an engine killed in the middle, ranks behind it waited for the
whole deadline, and so did the sender. The price: the trainer sends once for each engine.

What is sent is the published file, not the parameters: the trainer's next step may change those meanwhile.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from relax_core.contracts.engine import EngineError, EngineUnreachable, TensorSpec, WeightManifest
from relax_core.weights.transports.base import WeightGroupAddress, WeightReceiver

if TYPE_CHECKING:
    from relax_core.weights.group import WeightGroup

T = TypeVar("T")
GRACE_S = 5.0  # for our own end of a collective after the engine has said that its end is done


class CollectiveTransport:
    """``host``: this process's address, as engines reach it; ``timeout_s``: of joining, and of each broadcast.

    A group lives until a broadcast in it fails, or its engine is a new process that does not know it.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], *, host: str, timeout_s: float) -> None:
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[str, WeightGroup]] = {}  # engine url → the group and its name

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        old = receiver.url in self._groups
        try:
            self._send(receiver, manifest)
        except EngineUnreachable:
            raise
        except EngineError:
            if not old:
                raise
            self._send(receiver, manifest)  # its engine was restarted: the new process is in no group
        return receiver.end_weight_update(version=manifest.version, digest=manifest.digest)

    def close(self) -> None:
        """Ends the groups here; an engine's end goes with its process."""
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
                sent = _beside(lambda start=start, end=end: group.send([data[start:end]]))  # type: ignore[misc]
                receiver.receive_weights(bucket, group=name, version=manifest.version)
                _ended(sent, receiver.url, f"group {name}: broadcast")
        except EngineError as error:
            self._leave(receiver, gone=isinstance(error, EngineUnreachable))
            raise

    def _join(self, receiver: WeightReceiver) -> tuple[str, WeightGroup]:
        from relax_core.weights.group import WeightGroup

        listener = socket.create_server((self._host, 0))
        place = WeightGroupAddress(
            name=f"relax-{secrets.token_hex(8)}",
            address=self._host,
            port=listener.getsockname()[1],
            world_size=1 + receiver.group_ranks,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        joined = _beside(lambda: WeightGroup.join(place, rank=0, listener=listener))
        receiver.join_weight_group(place)
        self._groups[receiver.url] = place.name, _ended(joined, receiver.url, f"group {place.name}: joining")
        return self._groups[receiver.url]

    def _leave(self, receiver: WeightReceiver, *, gone: bool) -> None:
        """What is still being sent ends at its own deadline, in a thread that nobody waits for. ``gone``: it does not
        answer, and is not asked for anything more."""
        name, group = self._groups.pop(receiver.url, (None, None))
        if group is not None:
            group.abort()
        if gone:
            return
        if name is not None:
            with suppress(EngineError):  # a new process, which never knew the group
                receiver.leave_weight_group(name)
        receiver.abandon_weight_update()


def buckets(manifest: WeightManifest) -> Iterator[Sequence[TensorSpec]]:
    """Its tensors in order, some ``bucket_bytes`` at a time: what does not fit the bucket begins the next one."""
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


def _beside(action: Callable[[], T]) -> Future[T]:
    """Runs it in a thread that may be left behind: with a dead engine our end hangs until the group's deadline."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except Exception as error:  # belongs to whoever waits for it
            future.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


def _ended(future: Future[T], url: str, what: str) -> T:
    """The result of our own end, after the engine has finished its own."""
    try:
        return future.result(timeout=GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise EngineError(f"engine {url}: {what} did not end here: {error}") from error

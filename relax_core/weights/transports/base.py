"""Defines the protocols of a transport of published versions and of an engine's client that receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.contracts.engine import TensorSpec, WeightManifest


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
    """Is the client of an engine that receives weights.

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

    ``by_file`` says that engines read the published files themselves, so that the files may be several.
    """

    by_file: bool

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's answer when it serves the version; raises EngineError if it does not."""

    def forget(self, url: str) -> None:
        """Releases what the transport holds for an engine that has left; no push to it is in progress."""

    def close(self) -> None:
        """Releases what the transport holds."""

"""What carries a published version to one engine, and what it asks of that engine's client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_core.contracts.engine import TensorSpec, WeightManifest


@dataclass(frozen=True, kw_only=True)
class WeightGroupAddress:
    """Where a collective group meets. The sender is rank 0 and opens ``address``:``port``; ``backend``: gloo | nccl.
    Whoever waits for the others, or for a broadcast, does so for ``timeout_s`` seconds at most."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    timeout_s: float


class WeightReceiver(Protocol):
    """An engine's client. Every call has a deadline and raises EngineError, EngineUnreachable where nobody answers.

    ``group_ranks``: processes of the engine that join a group. What brings a version into force, `update_weights`,
    `update_weights_from_disk` and `end_weight_update`, answers with ``stall_ms``, for how long decoding stood still.
    Samples that run go on under the new version.
    """

    url: str
    group_ranks: int

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Reads the published file itself."""

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads the published file's folder as a Hugging Face model."""

    def join_weight_group(self, place: WeightGroupAddress) -> dict[str, Any]:
        """Takes ranks 1 to ``group_ranks``; returns once all are there."""

    def leave_weight_group(self, name: str) -> dict[str, Any]: ...

    def begin_weight_update(self) -> dict[str, Any]: ...

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Takes one broadcast of bytes: ``tensors``, one after the other."""

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends a session that has failed; an engine that loads as it receives serves nothing after that."""

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Serves what came in, where its digest is ``digest``; refuses it otherwise."""


class WeightTransport(Protocol):
    """Calls for different receivers may come at the same time."""

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        """Returns the engine's answer once it serves the version; raises EngineError where it does not."""

    def close(self) -> None: ...

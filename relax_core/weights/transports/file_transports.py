"""The two transports of which the published file itself is the carrier: the engine reads it."""

from __future__ import annotations

from typing import Any

from relax_core.contracts.engine import WeightManifest
from relax_core.weights.transports.base import WeightReceiver


class SharedMemoryTransport:
    """The engine maps the file, which lies in this host's memory, and compares each bucket's digest."""

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        return receiver.update_weights(manifest)

    def close(self) -> None:
        """Holds nothing."""


class DiskTransport:
    """The engine loads the file's folder by SGLang's own route; both ends must see it under the same path."""

    def push(self, receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, Any]:
        return receiver.update_weights_from_disk(manifest)

    def close(self) -> None:
        """Holds nothing."""

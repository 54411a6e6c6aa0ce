"""Holds the client's calls about weights: SGLang's routes, and one of Relax's own for the published file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.engine import TensorSpec, WeightManifest
from relax_core.engines.protocol.reply_checks import Updated
from relax_core.weights.transports.base import WeightGroupAddress


class WeightCalls(ABC):
    """Implements `WeightReceiver` for the embedded engine."""

    group_ranks = 1

    @abstractmethod
    def _call(
        self, method: str, route: str, payload: Any = None, *, needs: type[msgspec.Struct] | None = None
    ) -> dict[str, Any]: ...

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads a published version from shared memory; returns once it is served.

        The answer has ``weight_version``, ``digest`` and ``stall_ms``.
        """
        return self._call("POST", "/update_weights_from_shared_memory", manifest, needs=Updated)

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads a published version from its folder, which is read as a Hugging Face model.

        The answer has the fields of `update_weights`. SGLang's route carries one digest of one file, so that a version
        with frozen tensors is read by its manifest, from the same folder.
        """
        if manifest.frozen is not None:
            return self.update_weights(manifest)
        folder = str(Path(manifest.path).parent)
        body = {"model_path": folder, "weight_version": str(manifest.version), "digest": manifest.digest}
        return self._call("POST", "/update_weights_from_disk", body, needs=Updated)

    def join_weight_group(self, address: WeightGroupAddress) -> dict[str, Any]:
        """Joins the group as ranks 1 to ``group_ranks``; returns once all ranks have joined."""
        body = group_body(address) | {"timeout_s": address.timeout_s}
        return self._call("POST", "/init_weights_update_group", body)

    def leave_weight_group(self, name: str) -> dict[str, Any]:
        """Leaves the group of this name."""
        return self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    def begin_weight_update(self) -> dict[str, Any]:
        """Opens a session; the tensors of a session that is still open are thrown away."""
        return self._call("POST", "/begin_weight_update", {})

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Receives one broadcast of the group's rank 0: the bytes of ``tensors``, one after the other."""
        body = tensors_body(tensors, group=group) | {"weight_version": str(version)}
        return self._call("POST", "/update_weights_from_distributed", body)

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends a failed session.

        The embedded engine needs no call for it: it serves its old weights until a session succeeds, and the next
        session throws away what came in.
        """
        return {}

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Ends the session and serves its weights. Raises EngineError if they have another digest."""
        body = {"weight_version": str(version), "digest": digest}
        return self._call("POST", "/end_weight_update", body, needs=Updated)


def group_body(address: WeightGroupAddress) -> dict[str, Any]:
    """Returns SGLang's body of /init_weights_update_group."""
    return {
        "master_address": address.address,
        "master_port": address.port,
        "rank_offset": 1,
        "world_size": address.world_size,
        "group_name": address.name,
        "backend": address.backend,
    }


def tensors_body(tensors: Sequence[TensorSpec], *, group: str) -> dict[str, Any]:
    """Returns SGLang's body of /update_weights_from_distributed: one broadcast of all ``tensors``."""
    return {
        "names": [spec.name for spec in tensors],
        "dtypes": [spec.dtype for spec in tensors],
        "shapes": [spec.shape for spec in tensors],
        "group_name": group,
        "load_format": "flattened_bucket",
    }

"""The client's calls about weights, by SGLang's routes, and one of our own for the published file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_core.contracts.engine import TensorSpec, WeightManifest
from relax_core.weights.transports.base import WeightGroupAddress


class WeightCalls(ABC):
    """What a `WeightReceiver` answers, for the embedded engine."""

    group_ranks = 1

    @abstractmethod
    def _call(self, method: str, route: str, payload: Any = None) -> dict[str, Any]: ...

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Brings a published version in: ``weight_version``, ``digest``, ``stall_ms``. Returns once it is served."""
        return self._call("POST", "/update_weights_from_shared_memory", manifest)

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """The same from the file's folder, read as a Hugging Face model."""
        folder = str(Path(manifest.path).parent)
        body = {"model_path": folder, "weight_version": str(manifest.version), "digest": manifest.digest}
        return self._call("POST", "/update_weights_from_disk", body)

    def join_weight_group(self, place: WeightGroupAddress) -> dict[str, Any]:
        """Joins as ranks 1 to ``group_ranks``; returns once all are there."""
        body = group_body(place) | {"timeout_s": place.timeout_s}
        return self._call("POST", "/init_weights_update_group", body)

    def leave_weight_group(self, name: str) -> dict[str, Any]:
        return self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    def begin_weight_update(self) -> dict[str, Any]:
        """Opens a session; what an open one had is thrown away."""
        return self._call("POST", "/begin_weight_update", {})

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Takes one broadcast of the group's rank 0: the bytes of ``tensors``, one after the other."""
        body = tensors_body(tensors, group=group) | {"weight_version": str(version)}
        return self._call("POST", "/update_weights_from_distributed", body)

    def abandon_weight_update(self) -> dict[str, Any]:
        """After a failure. The embedded engine needs no word of it: it serves what it has until a session ends well,
        and the next one throws away what came in."""
        return {}

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Ends the session; raises EngineError where what came in has another digest."""
        return self._call("POST", "/end_weight_update", {"weight_version": str(version), "digest": digest})


def group_body(place: WeightGroupAddress) -> dict[str, Any]:
    """Of /init_weights_update_group, as SGLang knows it."""
    return {
        "master_address": place.address,
        "master_port": place.port,
        "rank_offset": 1,
        "world_size": place.world_size,
        "group_name": place.name,
        "backend": place.backend,
    }


def tensors_body(tensors: Sequence[TensorSpec], *, group: str) -> dict[str, Any]:
    """Of /update_weights_from_distributed, as SGLang knows it: one broadcast of all ``tensors``."""
    return {
        "names": [spec.name for spec in tensors],
        "dtypes": [spec.dtype for spec in tensors],
        "shapes": [spec.shape for spec in tensors],
        "group_name": group,
        "load_format": "flattened_bucket",
    }

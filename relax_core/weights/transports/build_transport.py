"""The transport of a name."""

from __future__ import annotations

from relax_core.config.schema import WeightTransportName
from relax_core.weights.transports.base import WeightTransport
from relax_core.weights.transports.collective import CollectiveTransport
from relax_core.weights.transports.file_transports import DiskTransport, SharedMemoryTransport


def build_transport(name: WeightTransportName, *, host: str, timeout_s: float) -> WeightTransport:
    """``host``: the trainer's address; ``timeout_s``: of each call to an engine."""
    match name:
        case WeightTransportName.shared_memory:
            return SharedMemoryTransport()
        case WeightTransportName.disk:
            return DiskTransport()
        case WeightTransportName.gloo:
            return CollectiveTransport("gloo", host=host, timeout_s=timeout_s)
        case WeightTransportName.nccl:
            return CollectiveTransport("nccl", host=host, timeout_s=timeout_s)
        case _:
            raise AssertionError(f"engine.weight_transport={name.value} names no transport: choose_transport first")

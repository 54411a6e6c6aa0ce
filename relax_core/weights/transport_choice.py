"""Chooses and builds the transport of weight versions, depending on the hosts of the trainer and the engines."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.config.choices import WeightTransportName
from relax_core.config.schema import RelaxConfig
from relax_core.weights.transports import CollectiveTransport, DiskTransport, SharedMemoryTransport, WeightTransport


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """Names the chosen transport; ``reason`` is one clause for the plan and the log."""

    name: WeightTransportName
    reason: str


def choose_transport(config: RelaxConfig) -> TransportChoice:
    """Returns ``engine.weight_transport``, or the transport that fits the topology if the setting is auto.

    The setting auto never chooses NCCL: it has not been tested on GPUs yet, and engines on one host can read the
    published file.
    """
    wanted = config.engine.weight_transport
    if wanted is not WeightTransportName.auto:
        return TransportChoice(name=wanted, reason="engine.weight_transport sets it")
    if config.engine.urls:
        return _choice("disk", "engines that were attached by URL may be anywhere; they see the run's folder")
    if config.launcher.ray_address is not None or config.placement.nodes > 1:
        return _choice("disk", "engines may be on other nodes, which see the run's folder")
    return _choice("shared_memory", "every engine is on this host")


def _choice(name: str, reason: str) -> TransportChoice:
    return TransportChoice(name=WeightTransportName(name), reason=reason)


def build_transport(name: WeightTransportName, *, host: str, timeout_s: float) -> WeightTransport:
    """Builds a transport. ``host``: address of the trainer. ``timeout_s``: deadline of each call to an engine."""
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
            raise AssertionError(
                f"engine.weight_transport={name.value} is not a transport: call choose_transport first"
            )

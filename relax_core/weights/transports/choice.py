"""How a new weight version reaches the engines: chosen by where trainer and engines are."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.config.schema import RelaxConfig, WeightTransportName


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """``reason``: one clause, for the plan and the log."""

    name: WeightTransportName
    reason: str


def choose_transport(config: RelaxConfig) -> TransportChoice:
    """``engine.weight_transport``, or what fits the topology where it is auto. Never NCCL: no GPU has run it yet, and
    what is sent is the published file, which engines on one host read themselves."""
    wanted = config.engine.weight_transport
    if wanted is not WeightTransportName.auto:
        return TransportChoice(name=wanted, reason="engine.weight_transport asks for it")
    if config.engine.urls:
        return _choice("disk", "engines that were attached by URL may be anywhere; they see the run's folder")
    if config.launcher.ray_address is not None:
        return _choice("disk", "engines may be on other nodes, which see the run's folder")
    return _choice("shared_memory", "every engine is on this host")


def _choice(name: str, reason: str) -> TransportChoice:
    return TransportChoice(name=WeightTransportName(name), reason=reason)

"""Defines the keys of `gateway`, `engine.elastic` and `engine.autoscaler`, which say how engines come and go."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class GatewayConfig:
    """Holds the keys of `gateway`."""

    name: str = MISSING
    host: str = MISSING
    port: int = MISSING
    allowed_hosts: list[str] = field(default_factory=list)


@dataclass
class ElasticConfig:
    """Holds the keys of `engine.elastic`."""

    max_count: int = MISSING
    drain_timeout_s: float = MISSING
    allowed_hosts: list[str] = field(default_factory=list)
    lost_after_s: float = MISSING
    probe_tolerance: float = MISSING


@dataclass
class AutoscalerConfig:
    """Holds the keys of `engine.autoscaler`."""

    enabled: bool = MISSING
    min_count: int = MISSING
    window_s: float = MISSING
    cooldown_s: float = MISSING

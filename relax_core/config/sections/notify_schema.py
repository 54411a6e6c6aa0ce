"""Defines the type of the keys of `notify`, which say of what a run tells somebody, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

# What `notify.events` may name. "restarts": tier 1 more often than notify.restarts_per_hour; "recovery": tier 2.
EVENTS = (
    *("started", "finished", "stopped", "failed", "restarts", "recovery", "stalled"),
    *("engine_lost", "order_failed", "disk_low", "straggler", "rule"),
)


@dataclass
class NotifyConfig:
    """Holds the keys of `notify`."""

    urls_file: str | None = None
    events: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    repeat_s: float = MISSING
    restarts_per_hour: int = MISSING
    disk_gib: float = MISSING

"""Defines the keys of `agent` and `endpoint`: the programs that play episodes, and the server that answers them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

HISTORIES = ("continue", "template")


@dataclass
class AgentConfig:
    """Holds the keys of `agent`."""

    command: str | None = None  # None: agents that Relax does not start open the sessions
    cwd: str | None = None  # None: the folder in which the run was started
    env: dict[str, str] = field(default_factory=dict, repr=False)
    python: str | None = None  # None: the Python of the run
    workers: int = MISSING
    timeout_s: float = MISSING
    memory_gib: float = MISSING
    processes: int = MISSING
    grace_s: float = MISSING
    history: str = MISSING
    tool_parser: str = MISSING


@dataclass
class EndpointConfig:
    """Holds the keys of `endpoint`."""

    host: str = MISSING
    port: int = MISSING
    max_body_mb: int = MISSING
    max_sessions: int | None = None  # None: as many as there may be episodes in flight
    idle_s: float = MISSING

"""Defines the state of a role's worker as the panel shows it, without imports, because the controller reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleStateName = Literal["starting", "ready", "running", "waiting", "restarting", "failed", "done"]


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """Holds the state of one worker.

    ``since_s`` is the number of seconds in this state. ``restarts`` counts how often its process was replaced.
    ``detail`` says what it waits for, or why it failed.
    """

    name: str
    state: RoleStateName
    since_s: float
    restarts: int = 0
    detail: str = ""

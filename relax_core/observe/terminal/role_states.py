"""How a role is doing, as the panel shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleStateName = Literal["starting", "ready", "running", "waiting", "restarting", "failed", "done"]


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """``since_s``: seconds in this state. ``restarts``: how often the role's process was replaced.
    ``detail``: what it waits for, or why it failed."""

    name: str
    state: RoleStateName
    since_s: float
    restarts: int = 0
    detail: str = ""

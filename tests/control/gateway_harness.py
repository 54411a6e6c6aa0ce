"""Runs the supervisor's checks of a gateway that a test has started."""

from __future__ import annotations

import time

from relax_core.contracts.monitor import Monitor
from relax_core.control.gateway_process import GatewayProcess

DEADLINE_S = 120.0


def look_after(process: GatewayProcess) -> None:
    """Runs the supervisor's check of the gateway once."""
    Monitor([process.check()]).tick()


def until_up(process: GatewayProcess) -> None:
    """Runs the check until the gateway has reported its address."""
    deadline = time.monotonic() + DEADLINE_S
    while not process.is_up:
        assert time.monotonic() < deadline
        look_after(process)
        time.sleep(0.05)

"""Finds the run's bus and workers.

Waits for processes that are still starting, because all processes start at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray_bus import RayBus, traced_bus
from relax_core.contracts.monitor import Waiting
from relax_core.roles.role_context import BUS, RunContext

T = TypeVar("T")
RETRY_S = 0.05


def discover_bus(context: RunContext, waiting: Waiting) -> RayBus:
    """Returns the run's bus; ``waiting`` records waits for the bus.

    Raises TimeoutError if the bus is not found within ``run.start_timeout_s``.
    """
    with waiting("its start", on=BUS):
        bus = _connect(BUS, lambda: connect_bus(BUS, context.namespace), timeout_s=context.config.run.start_timeout_s)
    return traced_bus(bus, waiting)


def discover_worker(context: RunContext, name: str) -> Any:
    """Returns another worker's Ray handle.

    Raises TimeoutError if the worker is not found within ``run.start_timeout_s``.
    """
    import ray

    return _connect(
        name,
        lambda: ray.get_actor(name, namespace=context.namespace),
        timeout_s=context.config.run.start_timeout_s,
    )


def _connect(what: str, connect: Callable[[], T], *, timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connect()
        except ValueError as error:  # no actor with this name exists yet
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} was not found within {timeout_s:.0f} s: {error}") from error
            time.sleep(RETRY_S)

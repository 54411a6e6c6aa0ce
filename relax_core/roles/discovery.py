"""Finds the run's bus and workers, which may still be starting, because all processes start together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray_bus import RayBus
from relax_core.roles.role_context import BUS, RunContext

T = TypeVar("T")
RETRY_S = 0.05


def discover_bus(context: RunContext, waiting: Waiting) -> RayBus:
    """Returns the run's bus, whose waits ``waiting`` records.

    Raises TimeoutError if the bus is not found within ``run.start_timeout_s``.
    """
    with waiting("its start", on=BUS):
        bus = _connect(BUS, lambda: connect_bus(BUS, context.namespace), timeout_s=context.config.run.start_timeout_s)
    return traced_bus(bus, waiting)


def discover_worker(context: RunContext, name: str) -> Any:
    """Returns another worker's Ray handle; raises TimeoutError if it is not found within ``run.start_timeout_s``."""
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
        except ValueError as error:  # no actor of that name yet
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} was not there within {timeout_s:.0f} s: {error}") from error
            time.sleep(RETRY_S)


# -- A bus whose waiting calls are recorded among its worker's waits --------------------------------------------------

Waiting = Callable[..., AbstractContextManager[None]]  # `Worker.waiting`
TRACED_CALLS = (  # a `wait_progress` is idle time and not a wait
    *("admit", "put", "drop", "hold", "name_modalities"),
    *("lease", "read", "write", "ack", "release", "snapshot"),
)


def traced_bus(bus: RayBus, waiting: Waiting) -> RayBus:
    """Returns the bus with its waiting calls recorded by ``waiting``."""
    return cast(RayBus, _TracedBus(bus, waiting))


class _TracedBus:
    def __init__(self, bus: RayBus, waiting: Waiting) -> None:
        self._bus = bus
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bus, name)
        if name not in TRACED_CALLS:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            with self._waiting(name, on=BUS):
                return await method(*args, **kwargs)

        return call

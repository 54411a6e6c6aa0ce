"""A bus whose waiting calls are recorded among its worker's waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from relax_core.bus.ray_bus import RayBus
from relax_core.roles.process.role_context import BUS

Waiting = Callable[..., AbstractContextManager[None]]  # `Worker.waiting`
TRACED_CALLS = ("lease", "read", "write", "ack", "release", "snapshot")  # a `wait_progress` is idle time and not a wait
TRACED_AWAITS = ("admit_async", "put_async", "drop_async", "hold_async", "name_modalities_async")


def traced_bus(bus: RayBus, waiting: Waiting) -> RayBus:
    """Returns the bus with its waiting calls recorded by ``waiting``."""
    return cast(RayBus, _TracedBus(bus, waiting))


class _TracedBus:
    def __init__(self, bus: RayBus, waiting: Waiting) -> None:
        self._bus = bus
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bus, name)
        if name in TRACED_CALLS:

            def call(*args: Any, **kwargs: Any) -> Any:
                with self._waiting(name, on=BUS):
                    return method(*args, **kwargs)

            return call
        if name in TRACED_AWAITS:

            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with self._waiting(name.removesuffix("_async"), on=BUS):
                    return await method(*args, **kwargs)

            return call_async
        return method

"""A blocking bus for tests without an event loop: each call blocks its thread until the result arrives."""

from __future__ import annotations

import inspect
from typing import Any

from relax_core.bus.ray_bus import blocking


class BlockingBus:
    """Runs each asynchronous call of ``bus`` to its end. Can be pickled together with ``bus``."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockingBus, (self.bus,)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.bus, name)
        if not inspect.iscoroutinefunction(value):
            return value
        return lambda *args, **kwargs: blocking(value(*args, **kwargs))

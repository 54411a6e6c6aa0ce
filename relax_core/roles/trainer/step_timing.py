"""Where the time of a train step goes, on the trainer's lead rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from relax_core.contracts.bus import BusTimeout, Lease

T = TypeVar("T")
LeaseT = TypeVar("LeaseT", Lease, Lease | None)


@dataclass(kw_only=True)
class StepClock:
    """Milliseconds of one step on the lead rank, by part. ``wait_ms``: rows were not ready; ``bus_ms``: all else of the
    calls that acknowledge and lease. ``push_ms``: how long the last push took; it goes on beside the trainer, and only
    what was waited for is in ``sync_ms``. ``stall_ms``: how long an engine's decoding stood still for it."""

    wait_ms: float = 0.0
    bus_ms: float = 0.0
    decode_ms: float = 0.0
    train_ms: float = 0.0
    sync_ms: float = 0.0
    push_ms: float = 0.0
    stall_ms: float = 0.0
    checkpoint_ms: float = 0.0

    def timed(self, part: str, call: Callable[[], T]) -> T:
        """Calls it and adds its time to ``part``."""
        began = time.perf_counter()
        result = call()
        self._add(part, time.perf_counter() - began)
        return result

    def timed_lease(self, call: Callable[[], LeaseT], *, timeout_s: float) -> LeaseT:
        """Calls the bus for a lease; where it raises `BusTimeout` it has waited ``timeout_s`` for rows."""
        began = time.perf_counter()
        try:
            lease = call()
        except BusTimeout:
            self._add_bus_call(time.perf_counter() - began, waited_s=timeout_s)
            raise
        self._add_bus_call(time.perf_counter() - began, waited_s=0.0 if lease is None else lease.waited_s)
        return lease

    def _add_bus_call(self, seconds: float, *, waited_s: float) -> None:
        self._add("wait_ms", waited_s)
        self._add("bus_ms", seconds - waited_s)

    def _add(self, part: str, seconds: float) -> None:
        setattr(self, part, getattr(self, part) + 1e3 * seconds)

"""Measures the parts of a train step's time on the trainer's lead rank."""

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
    """Milliseconds of one step on the lead rank, by part.

    ``wait_ms`` is the wait for groups, and ``bus_ms`` the rest of the calls that lease and acknowledge. ``push_ms`` is
    the time of the last push, which runs beside the trainer; only the wait for its end is in ``sync_ms``. ``stall_ms``
    is how long the push stopped an engine's decoding.
    """

    wait_ms: float = 0.0
    bus_ms: float = 0.0
    decode_ms: float = 0.0
    train_ms: float = 0.0
    sync_ms: float = 0.0
    push_ms: float = 0.0
    stall_ms: float = 0.0
    checkpoint_ms: float = 0.0

    def timed(self, part: str, call: Callable[[], T]) -> T:
        """Calls ``call`` and adds its time to ``part``."""
        began = time.perf_counter()
        result = call()
        self._add(part, time.perf_counter() - began)
        return result

    def timed_lease(self, call: Callable[[], LeaseT], *, timeout_s: float) -> LeaseT:
        """Calls the bus for a lease; a call that raises `BusTimeout` has waited ``timeout_s`` for groups."""
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

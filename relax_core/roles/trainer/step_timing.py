"""Measures the parts of a train step's time on the trainer's lead rank, and names the times of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from relax_core.contracts.bus import BusTimeout, Lease
from relax_core.contracts.train import RankTimes
from relax_core.roles.process.role_context import worker_name

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


def rank_values(ranks: Sequence[RankTimes], *, now_s: float) -> dict[str, float]:
    """Returns the numbers of a step's record of all ranks of the policy, which is made at Unix time ``now_s``.

    A rank's ``step_ms`` is the time from its first call of the step to the end of its last one, and ``lag_ms`` the time
    from there to the record. The clocks of several hosts are taken to agree.
    """
    values: dict[str, float] = {}
    for rank, times in enumerate(ranks):
        name = worker_name("actor", rank)
        values[f"{name}/step_ms"] = 1e3 * (times.ended_s - times.began_s)
        values[f"{name}/lag_ms"] = 1e3 * (now_s - times.ended_s)
        values[f"{name}/core_wait_ms"] = times.core_wait_ms
        values[f"{name}/rows"] = float(times.rows)
        values |= {f"{name}/{part}_ms": ms for part, ms in times.wall_ms.items()}
        values |= {f"{name}/cpu/{part}_ms": ms for part, ms in times.cpu_ms.items()}
    return {name: round(value, 3) for name, value in values.items()}

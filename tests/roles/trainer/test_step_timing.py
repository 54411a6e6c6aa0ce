"""The parts of a step's time, measured with real calls; the clock counts each call once, in its part."""

from __future__ import annotations

import time

import pytest

from relax_core.contracts.bus import BusTimeout, Lease
from relax_core.roles.trainer.step_metrics import StepClock


def lease_after(seconds: float, *, waited_s: float) -> Lease:
    """Returns a bus call that takes ``seconds``, of which it waits ``waited_s`` for groups."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return Lease(lease_id=1, task="actor", rows=[], waited_s=waited_s)


def test_what_a_call_waited_for_rows_is_told_apart() -> None:
    clock = StepClock()
    began = time.perf_counter()
    clock.timed_lease(lambda: lease_after(0.03, waited_s=0.02), timeout_s=1.0)
    assert clock.timed_lease(lambda: None, timeout_s=1.0) is None  # an ack without a request for the next lease
    took_ms = 1e3 * (time.perf_counter() - began)
    assert clock.wait_ms == pytest.approx(20.0)
    assert clock.bus_ms >= 10.0 - 1e-6
    assert clock.wait_ms + clock.bus_ms <= took_ms


def test_a_call_past_its_deadline_has_waited_for_all_of_it() -> None:
    clock = StepClock()

    def no_rows() -> Lease:
        lease_after(0.02, waited_s=0.0)
        raise BusTimeout("rollout owes them")

    for _ in range(2):
        with pytest.raises(BusTimeout):
            clock.timed_lease(no_rows, timeout_s=0.015)
    assert clock.wait_ms == pytest.approx(30.0)
    assert clock.bus_ms >= 10.0 - 1e-6


def test_parts_add_up_over_calls() -> None:
    clock = StepClock()
    for _ in range(3):
        with clock.timed("train_ms"):
            pass
    once = clock.train_ms
    with clock.timed("train_ms"):
        lease_after(0.01, waited_s=0.0)
    assert clock.train_ms >= once + 10.0 - 1e-6
    assert (clock.sync_ms, clock.bus_ms) == (0.0, 0.0)

"""Tests that calls with the same key run in order, and that calls with different keys do not wait for each other."""

from __future__ import annotations

import threading

import pytest

from relax_core.weights.call_queues import CallQueues

ENDS_S = 60.0


def test_calls_for_one_key_come_in_order_and_those_for_others_beside_them() -> None:
    calls, gate, order = CallQueues(), threading.Event(), []
    held = [calls.put("slow", lambda: (gate.wait(ENDS_S), order.append(0)))]
    held += [calls.put("slow", lambda number=number: order.append(number)) for number in range(1, 50)]
    assert calls.put("quick", lambda: "done").result(ENDS_S) == "done"
    assert not order and not any(call.done() for call in held)
    gate.set()
    for call in held:
        call.result(ENDS_S)
    assert order == list(range(50))


def test_a_call_that_fails_or_is_cancelled_ends_alone() -> None:
    calls, gate = CallQueues(), threading.Event()
    first = calls.put("a", lambda: gate.wait(ENDS_S))
    cancelled, fails = calls.put("a", lambda: 1), calls.put("a", lambda: 1 / 0)
    last = calls.put("a", lambda: "last")
    assert cancelled.cancel()
    gate.set()
    assert first.result(ENDS_S) is True and last.result(ENDS_S) == "last"
    with pytest.raises(ZeroDivisionError):
        fails.result(ENDS_S)
    assert calls.put("a", lambda: "again").result(ENDS_S) == "again"

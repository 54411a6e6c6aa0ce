"""Tests the recorded intervals during which an engine of a pool has running requests."""

from __future__ import annotations

import time

import pytest

from relax_core.engines.engine_states import RequestTimes


def test_requests_to_an_engine_are_one_span_and_each_counts_once() -> None:
    times = RequestTimes()
    began = time.time()
    with times.of("engine-0", samples=4):
        with times.of("engine-1", samples=8):
            time.sleep(0.02)
        time.sleep(0.02)
    with pytest.raises(OSError, match="lost"), times.of("engine-0", samples=2):
        raise OSError("lost")
    time.sleep(0.02)
    found = times.take()
    most_ms = 1e3 * (time.time() - began)
    assert found["engine/engine-0/requests"] == 2.0 and found["engine/engine-0/samples"] == 6.0
    assert found["engine/engine-1/requests"] == 1.0 and found["engine/engine-1/samples"] == 8.0
    assert 40.0 <= found["engine/engine-0/span_ms"] <= most_ms
    assert 20.0 <= found["engine/engine-1/span_ms"] <= found["engine/engine-0/span_ms"]
    assert 20.0 <= found["engine/engine-0/lag_ms"] <= found["engine/engine-1/lag_ms"] <= most_ms
    assert times.take() == {}

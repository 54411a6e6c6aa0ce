"""Tests a control call to several engines: each engine has a separate outcome, and errors name failed engines."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.engine_states import fan_out


def fails(error: Exception) -> Callable[[], int]:
    def call() -> int:
        raise error

    return call


def test_answers_and_failures_stand_side_by_side() -> None:
    calls = {"engine-0": lambda: 7, "engine-1": fails(EngineUnreachable("gone")), "engine-2": fails(EngineError("no"))}
    outcome = fan_out(calls)
    assert outcome.answers == {"engine-0": 7}
    assert {name: type(why) for name, why in outcome.failures.items()} == {
        "engine-1": EngineUnreachable,
        "engine-2": EngineError,
    }
    assert outcome.describe() == "2 of 3 engines failed: engine-1: gone; engine-2: no"


def test_nobody_failed_and_nobody_was_asked() -> None:
    assert fan_out({"engine-0": lambda: None}).describe() == ""
    assert fan_out({}).answers == {}


def test_the_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=120.0)
    assert len(fan_out({str(name): meeting.wait for name in range(3)}).answers) == 3


def test_a_fault_of_ours_is_no_engines_outcome() -> None:
    with pytest.raises(KeyError):
        fan_out({"engine-0": fails(KeyError("ours"))})

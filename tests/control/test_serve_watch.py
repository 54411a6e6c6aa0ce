"""Serve's own controller dies or freezes: Ray restarts it in place, and the watch reports that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from relax_core.contracts.process_trees import process_state
from relax_core.control.serve_watch import ServeLost, ServeWatch

DEADLINE_S = 120.0
FROZEN_S = 5.0


@pytest.fixture
def clock() -> list[float]:
    """Seconds that only the test advances, so that a slow machine freezes no process."""
    return [0.0]


@pytest.fixture
def watch(ray_session: str, clock: list[float]) -> Iterator[ServeWatch]:
    from ray import serve

    serve.start(proxy_location="Disabled")
    yield ServeWatch(frozen_after_s=FROZEN_S, clock=lambda: clock[0])
    serve.shutdown()


def look_until(watch: ServeWatch, condition: Callable[[], bool]) -> list[str]:
    """Checks until the condition holds, and returns what the checks reported."""
    deadline, told = time.monotonic() + DEADLINE_S, []
    while not condition():
        assert time.monotonic() < deadline
        if (how := watch.check()) is not None:
            told.append(how)
        time.sleep(0.02)
    return told


def pid_of(watch: ServeWatch) -> int:
    look_until(watch, lambda: watch._pid is not None)
    assert watch._pid is not None
    return watch._pid


def test_deaths_and_freezes_of_the_controller(watch: ServeWatch, clock: list[float]) -> None:
    first = pid_of(watch)
    os.kill(first, signal.SIGKILL)
    assert look_until(watch, lambda: watch.restarts == 1) == ["died"]

    second = pid_of(watch)
    assert second != first
    os.kill(second, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while not process_state(second).startswith("stopped"):
        assert time.monotonic() < deadline
    watch.check()  # a call that it cannot answer

    def time_passes() -> bool:
        clock[0] += 1.0
        return watch.restarts == 2

    (told,) = look_until(watch, time_passes)
    assert told.startswith("froze (no answer for 6 s, state stopped) and was killed by SIGKILL")

    import ray

    ray.kill(watch._controller, no_restart=True)
    with pytest.raises(ServeLost, match="Serve's controller died for good"):
        look_until(watch, lambda: False)

"""Tests the monitor's loop: the times of its checks, the effects of findings and errors, and concurrent work."""

from __future__ import annotations

import threading

import pytest

from relax_core.contracts.monitor import LONGEST_GAP_S, Check, Elapsed, Finding, Monitor

DEADLINE_S = 60.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_check_has_its_interval_and_a_finding_its_action() -> None:
    clock, looks, found = Clock(), list[str](), list[str]()

    def look() -> Finding | None:
        looks.append("seldom")
        return Finding(failed_part="engine-0", how="died") if clock.now >= 2.0 else None

    def often() -> None:
        looks.append("often")

    table = [
        Check(name="seldom", every_s=2.0, look=look, act=lambda finding: found.append(str(finding))),
        Check(name="often", every_s=0.0, look=often, act=pytest.fail),
    ]
    with Monitor(table, clock=clock) as monitor:
        monitor.tick()
        clock.now = 1.0
        monitor.tick()
        monitor.tick(at_once=["seldom"])
        assert looks == ["seldom", "often", "often", "seldom", "often"] and found == []
        clock.now = 3.0
        monitor.tick(only=["often"])
        assert looks[-2:] == ["often", "often"] and found == []
        monitor.tick()
    assert found == ["engine-0 died"]


def test_a_check_beside_the_loop_acts_once_in_its_thread_and_then_ends() -> None:
    acted, ended = list[str](), threading.Event()

    def act(finding: Finding) -> None:
        acted.append(threading.current_thread().name)

    check = Check(
        name="bus",
        every_s=0.01,
        look=lambda: Finding(failed_part="the bus", how="froze"),
        act=act,
        in_thread=True,
        at_end=ended.set,
    )
    with Monitor([check]):
        assert ended.wait(DEADLINE_S)
    assert acted == ["monitor-bus"]


def test_an_error_beside_the_loop_ends_the_loop() -> None:
    ended = threading.Event()

    def look() -> None:
        raise OSError("no such process")

    def quiet(arguments: object) -> None: ...

    hook, threading.excepthook = threading.excepthook, quiet
    try:
        with Monitor(
            [Check(name="Ray", every_s=0.0, look=look, act=pytest.fail, in_thread=True, at_end=ended.set)]
        ) as monitor:
            assert ended.wait(DEADLINE_S)
            with pytest.raises(OSError, match="no such process"):
                monitor.tick()
    finally:
        threading.excepthook = hook


def test_an_empty_cause_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        Finding(failed_part="the bus", how="")


def test_a_pause_of_this_process_is_no_silence_of_others() -> None:
    clock = Clock()
    elapsed = Elapsed(clock)
    assert elapsed.since_last() == 0.0
    clock.now = 1.0
    assert elapsed.since_last() == 1.0
    clock.now = 100.0
    assert elapsed.since_last() == LONGEST_GAP_S

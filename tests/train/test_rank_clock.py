"""The parts of a rank's update in wall time, in processor time, and in waits for a core."""

from __future__ import annotations

import os
import threading
import time

import pytest

from relax_core.contracts.host.core_wait import core_wait_s
from relax_core.train.updates import RankClock, times_of_step


def work(seconds: float) -> None:
    """Computes for so long, by processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_wall_and_processor_time_are_apart() -> None:
    clock = RankClock()
    for _ in range(2):
        with clock.timed("forward"):
            work(0.02)
        with clock.timed("reduce"):
            time.sleep(0.03)
        clock.add_rows(5)
    times = clock.times()
    assert times.rows == 10 and times.began_s <= times.ended_s <= time.time()
    assert times.wall_ms["forward"] >= times.cpu_ms["forward"] >= 40.0
    assert times.wall_ms["reduce"] >= 60.0 and times.cpu_ms["reduce"] < 30.0
    assert 0.0 <= times.core_wait_ms <= times.wall_ms["forward"], "a wait for other ranks is none for a core"
    whole = times_of_step([times, times])
    assert whole.wall_ms["forward"] == 2 * times.wall_ms["forward"] and whole.rows == 20
    assert (whole.began_s, whole.ended_s) == (times.began_s, times.ended_s)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel does not tell it")
def test_threads_that_share_one_core_wait_for_it() -> None:
    waited: list[tuple[float, float]] = []
    core = min(os.sched_getaffinity(0))

    def compete() -> None:
        os.sched_setaffinity(0, {core})
        before, began = core_wait_s(), time.perf_counter()
        for _ in range(40):  # one that holds the interpreter's lock keeps the others from being ready
            sum(bytes(2**20))
            os.urandom(2**22)
        waited.append((core_wait_s() - before, time.perf_counter() - began))

    threads = [threading.Thread(target=compete) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert len(waited) == 3 and all(0.0 < wait <= took for wait, took in waited)
    before = core_wait_s()
    time.sleep(0.2)
    assert core_wait_s() - before < 0.19, "a sleeping thread is not ready to run"

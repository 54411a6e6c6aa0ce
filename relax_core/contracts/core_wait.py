"""Reads from the kernel how long a thread was ready to run but had no CPU core (its run-queue wait)."""

from __future__ import annotations

import os
import threading
import time

TOGETHER_S = 1e-4  # two clock readings within this time are accepted as simultaneous; usually they take a few µs
_TRIES = 4
_FILES = threading.local()  # the open file of each thread; kept open, because opening takes longer than reading


def core_wait_s() -> float:
    """Returns the seconds that the calling thread has waited for a core since its start, 0 without kernel support.

    Time does not count while the thread is stopped by a signal, sleeps, or waits for data.
    """
    descriptor = getattr(_FILES, "descriptor", None)
    if descriptor is None:
        try:
            descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            descriptor = -1
        _FILES.descriptor = descriptor
    if descriptor < 0:
        return 0.0
    return int(os.pread(descriptor, 96, 0).split()[1]) / 1e9


def clock_and_core_wait_s() -> tuple[float, float]:
    """Returns the values of ``time.perf_counter`` and `core_wait_s`, read at the same time.

    If the thread loses its core between the two readings, only the second reading contains the wait. So if the two
    readings take long, the function reads again.
    """
    for _ in range(_TRIES):
        before_s = time.perf_counter()
        wait_s = core_wait_s()
        after_s = time.perf_counter()
        if after_s - before_s < TOGETHER_S:
            break
    return after_s, wait_s

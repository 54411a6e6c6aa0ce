"""Reads from the kernel how long a thread was ready to run but had no CPU core (its run-queue wait)."""

from __future__ import annotations

import os
import threading
import time

TOGETHER_S = 1e-4  # two clock readings within this time count as simultaneous; usually they take a few us
_TRIES = 4
_FILES = threading.local()  # the open file of each thread, because opening it takes longer than reading it


def core_wait_s() -> float:
    """Returns the seconds that the calling thread has waited for a core since its start; 0 if not counted.

    Time in which a thread is stopped by a signal, sleeps, or waits for data does not count.
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

    If the thread loses its core between the two readings, only one of them counts the wait, so both are read again if
    reading took long.
    """
    for _ in range(_TRIES):
        before_s = time.perf_counter()
        wait_s = core_wait_s()
        after_s = time.perf_counter()
        if after_s - before_s < TOGETHER_S:
            break
    return after_s, wait_s

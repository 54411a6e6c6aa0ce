"""Reads how long a thread was ready to run and got no processor core, as the kernel counts it."""

from __future__ import annotations

import os
import threading
import time

TOGETHER_S = 1e-4  # two clocks that were read within this time were read together; it usually takes some us
_TRIES = 4
_FILES = threading.local()  # the open file of each thread, because opening it takes longer than reading it


def core_wait_s() -> float:
    """Returns the seconds that the calling thread has waited for a core since its start; 0 where no kernel tells it.

    A thread that is stopped by a signal, sleeps, or waits for data is not ready to run, so that does not count.
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
    """Returns the time of ``time.perf_counter`` and `core_wait_s`, read together.

    The kernel may take the core away between the two, and one of them would then count a wait that the other does not;
    so both are read again if reading took long.
    """
    for _ in range(_TRIES):
        before_s = time.perf_counter()
        wait_s = core_wait_s()
        after_s = time.perf_counter()
        if after_s - before_s < TOGETHER_S:
            break
    return after_s, wait_s

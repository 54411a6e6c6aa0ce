"""Reads how long a thread was ready to run and got no processor core, as the kernel counts it."""

from __future__ import annotations

import os
import threading

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

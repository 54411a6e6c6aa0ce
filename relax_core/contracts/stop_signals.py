"""The signals that stop a run, and who takes them.

The supervisor alone does. Every other process of a run has them blocked from its start on, as a process inherits that:
what sends a signal to all processes of a run, as systemd and Slurm do, stops it as one signal to the supervisor does.
"""

from __future__ import annotations

import ctypes
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """For a process that runs a user's code, in the thread that starts the threads of that code. The code may start
    programs and end them by such a signal: they must not inherit that it is blocked, nor that it is ignored. So this
    process takes the signals, and a function without effect handles them: getpid, as Python sets handlers of its own in
    the main thread alone, which Ray may have kept."""
    libc = ctypes.CDLL(None)
    for number in STOP_SIGNALS:
        libc.signal(int(number), libc.getpid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

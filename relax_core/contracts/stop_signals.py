"""Defines the signals that stop a run, and how the run's processes handle them.

Only the supervisor handles the stop signals. All other processes of a run block them from their start, because a
process inherits the blocked signals of its parent. Therefore a stop signal from systemd or Slurm to all processes of a
run has the same effect as one signal to the supervisor.
"""

from __future__ import annotations

import ctypes
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """Makes a process that runs a user's code ignore the stop signals without blocking them.

    The user's code may start programs and end them by a stop signal, so these programs must not inherit blocked or
    ignored stop signals. This function unblocks the signals and installs the C function getpid, which has no effect, as
    their handler. It does not use Python's signal handlers, because these can be set only in the main thread, and Ray
    may use the main thread. Call this function in the thread that starts the threads of the user's code.
    """
    libc = ctypes.CDLL(None)
    for number in STOP_SIGNALS:
        libc.signal(int(number), libc.getpid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

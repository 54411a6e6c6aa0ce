"""The signals that stop a run, and how its processes handle them.

Only the supervisor handles them. All other processes of a run block them from their start, because a process inherits
the blocked signals of its parent. So systemd and Slurm, which signal all processes of a run, have the same effect as
one signal to the supervisor.
"""

from __future__ import annotations

import ctypes
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """Makes this process ignore the stop signals without blocking them, for a process that runs a user's code.

    The user's code may start programs and end them by such a signal, so these programs must not inherit a blocked or
    ignored signal. This function unblocks the signals and installs getpid, a C function without effect, as their
    handler: Python can set handlers only in the main thread, and Ray may use that thread. Call it in the thread that
    starts the threads of the user's code.
    """
    libc = ctypes.CDLL(None)
    for number in STOP_SIGNALS:
        libc.signal(int(number), libc.getpid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

"""The signals that stop a run, and how its processes handle them.

Only the supervisor handles them. Every other process of a run blocks them from its start on, because a process inherits
the blocked signals of its parent. So systemd and Slurm, which signal all processes of a run, stop it like one signal to
the supervisor.
"""

from __future__ import annotations

import ctypes
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """Makes this process ignore the stop signals without blocking them, for a process that runs a user's code.

    The user's code may start programs and end them by such a signal, and these programs must inherit neither that the
    signal is blocked nor that it is ignored. So this function unblocks the signals and installs getpid, a C function
    without effect, as their handler: Python can set handlers in the main thread only, and Ray may use that thread. Call
    it in the thread that starts the threads of the user's code.
    """
    libc = ctypes.CDLL(None)
    for number in STOP_SIGNALS:
        libc.signal(int(number), libc.getpid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

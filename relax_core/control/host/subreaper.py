"""Makes this process a subreaper: descendants that lose their parent become its children, and it can kill them all.

Linux offers this through prctl(2), which neither the standard library nor psutil wraps.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress

EXIT_TIMEOUT_S = 10.0  # a process that SIGKILL does not end within this time hangs in the kernel
POLL_S = 0.02
PR_SET_PDEATHSIG, PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int | ctypes.c_char_p) -> None:
    """Sets an option of this process in the Linux kernel (man 2 prctl). Raises OSError if the kernel refuses it."""
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def become_subreaper() -> None:
    """Makes this process the parent of all its descendants that lose their own, so that `end_children` finds them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(*, spare: int | None = None) -> None:
    """Kills all descendants of this process but the child ``spare``, and waits until they have exited.

    Raises RuntimeError, which names the processes that SIGKILL does not end within `EXIT_TIMEOUT_S` seconds.
    """
    import psutil

    began = time.monotonic()
    while children := [one for one in psutil.Process().children(recursive=True) if one.pid != spare]:
        if time.monotonic() - began > EXIT_TIMEOUT_S:
            names = ", ".join(f"{child.pid} ({child.name()})" for child in children)
            raise RuntimeError(f"processes of the run that SIGKILL does not end within {EXIT_TIMEOUT_S:.0f} s: {names}")
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for child in children:
            with suppress(ChildProcessError):  # the child of a child
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(POLL_S)

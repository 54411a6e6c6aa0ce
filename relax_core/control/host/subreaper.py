"""A process that answers for everything below it: whatever loses its parent there becomes its child, and is ended."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress

GONE_S = 10.0  # what not even SIGKILL ends by then hangs in the kernel
POLL_S = 0.02
PR_SET_PDEATHSIG, PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int | ctypes.c_char_p) -> None:
    """Linux's own call; raises OSError where it refuses."""
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def become_subreaper() -> None:
    """From now on whatever loses its parent below this process becomes its child, and `end_children` finds it."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kills everything below this process, and waits for its end.

    Raises RuntimeError, naming what not even SIGKILL ends within `GONE_S` seconds.
    """
    import psutil

    began = time.monotonic()
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() - began > GONE_S:
            names = ", ".join(f"{child.pid} ({child.name()})" for child in children)
            raise RuntimeError(f"processes of the run that SIGKILL does not end within {GONE_S:.0f} s: {names}")
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)

"""Processes that a Slurm task starts, and their certain end. Nothing here imports Ray."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from relax_core.control.place import SHARED_MEMORY

GONE_S = 10.0  # what not even SIGKILL ends by then hangs in the kernel
POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class Child:
    """A process in a session of its own. It ignores SIGUSR1 and SIGUSR2, which Slurm sends to every process of a job,
    and is told to end when this process is gone."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None) -> None:
        out = log.open("ab") if log is not None else None
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            start_new_session=True,
            preexec_fn=_as_child,
        )
        if out is not None:
            out.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()


def _as_child() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # kept over exec, and by all that it starts
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def adopt_orphans() -> None:
    """From now on whatever loses its parent below this process becomes its child, and `end_children` finds it."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_children() -> None:
    """Kills everything below this process and waits for its end. Raises RuntimeError, naming what does not end."""
    import psutil

    deadline = time.monotonic() + GONE_S
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            names = ", ".join(f"{child.pid} ({child.name()})" for child in children)
            raise RuntimeError(f"processes of the run that SIGKILL does not end within {GONE_S:.0f} s: {names}")
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


def remove_place(pid: int, run_dir: Path) -> None:
    """What a run leaves outside of TMPDIR when it is killed: its published weights. ``pid``: of its supervisor."""
    for holder in (SHARED_MEMORY, run_dir):
        for folder in holder.glob(f"relax-{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)

"""Processes that a Slurm task starts, and their certain end. Nothing here imports Ray."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.control.host.subreaper import PR_SET_PDEATHSIG, prctl


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
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove_place(pid: int, run_dir: Path) -> None:
    """What a run leaves outside of TMPDIR when it is killed: its published weights. ``pid``: of its supervisor."""
    for holder in (SHARED_MEMORY, run_dir):
        for folder in holder.glob(f"relax-{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)

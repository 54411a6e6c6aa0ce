"""Starts and ends the child processes of a Slurm task.

This module imports no Ray.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_core.control.host.run_paths import WEIGHTS_PREFIX
from relax_core.control.host.subreaper import PR_SET_PDEATHSIG, prctl


class Child:
    """Starts a process in a session of its own, which receives SIGTERM when this process exits.

    It ignores SIGUSR1 and SIGUSR2, because Slurm sends them to every process of a job. Its output is appended to the
    file ``log`` if that is given.
    """

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
        """Returns the process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()


def _as_child() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # exec keeps this, and the processes that it starts inherit it
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove_run_folders(pid: int, *parents: Path) -> None:
    """Removes the published weights and media items that a killed run leaves in folders outside of TMPDIR.

    ``pid`` is that of its supervisor.
    """
    for parent in parents:
        for folder in parent.glob(f"{WEIGHTS_PREFIX}{pid}-*"):
            shutil.rmtree(folder, ignore_errors=True)

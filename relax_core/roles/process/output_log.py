"""Writes what a role's process prints to its own log file while the run goes on, because plug-ins print too."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from relax_core.contracts.private_folder import set_private_files


def keep_output(log_file: Path) -> None:
    """Appends stdout and stderr of this process to ``log_file`` from now on, if this is a process of Ray.

    Elsewhere, as in a test, it does nothing. A log file that cannot be opened, as on a full disk, is skipped.
    """
    import ray  # imported late, because Ray reads its token's path when it is imported

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    set_private_files()  # Ray on a cluster that the run joined has a umask of its own
    with suppress(OSError):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # Ray has replaced the streams by its own, which write to files of its session.
        sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> TextIO:
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace", line_buffering=True)

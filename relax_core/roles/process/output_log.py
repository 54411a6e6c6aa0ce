"""What a role's process prints goes into a log of its own, which says it while the run goes on: plug-ins print, too."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def keep_output(log_file: Path) -> None:
    """Appends stdout and stderr of this process to ``log_file``, from now on, where this is a process of Ray's own.

    Elsewhere, as in a test, it does nothing; a log that cannot be opened, on a full disk, costs its words alone.
    """
    import ray  # late: Ray reads its token's place when it is imported

    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    with suppress(OSError):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # Ray has put streams of its own in their places, which write to files of its session.
        sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> TextIO:
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors="backslashreplace", line_buffering=True)

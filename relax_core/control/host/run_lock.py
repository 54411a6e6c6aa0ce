"""Allows one run at a time in a run's folder, because two runs would write the same ledger and checkpoints."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_core.control.host.lock_file import locked

LOCK_FILE = ".lock"
POLL_S = 0.2
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def run_lock(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Locks the folder for this process and its forks, until the block or the last of them ends.

    Raises ValueError, which names the other process, if another run still uses the folder after ``wait_s`` seconds. If
    the file system has no locks, it prints a warning and continues.
    """
    deadline = time.monotonic() + wait_s
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            while not locked(file):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise ValueError(
                        f"run.dir={folder}: a run is at work there, {file.read().strip()}. Wait until it has ended, or "
                        "choose another run.dir."
                    )
                time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"relax: run.dir={folder} cannot be locked: make sure that no second run uses it", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield

"""Lets one process at a time make files that several processes want, such as those in the user's cache folder."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def file_locked(path: Path, *, deadline_s: float, makes: str) -> Iterator[None]:
    """Holds a lock file against other processes. The kernel releases it when the process dies.

    Raises TimeoutError, which says that another process ``makes`` something, if it holds the lock for ``deadline_s``.
    """
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"waited {deadline_s:.0f} s for another process that makes {makes} (lock {path})"
                    ) from None
                time.sleep(_POLL_S)
        yield

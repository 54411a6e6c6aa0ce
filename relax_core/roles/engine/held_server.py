"""Lets one run at a time hold a server that somebody else started, because two would replace each other's weights.

The mark is a locked file in the user's cache folder, which the kernel unlocks when the process that holds it exits.
Runs of other users, and on machines that do not share this folder, do not see it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from relax_core.contracts.engine import EngineError
from relax_core.contracts.host.private_folder import private_folder, user_cache

WAIT_S = 10.0  # how long a process of the same run that was killed may still hold it
RETRY_S = 0.1


def marks_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/servers``, by default below ``~/.cache``."""
    return user_cache("servers")


@contextmanager
def held_server(url: str, *, run_dir: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the server at ``url`` for the run in ``run_dir`` while the block runs.

    Raises EngineError, which names the run that has it, if another process holds it for ``wait_s`` seconds.
    """
    parts = urlsplit(url)
    path = marks_folder() / f"{parts.hostname}-{parts.port}"
    private_folder(path.parent, key="XDG_CACHE_HOME")
    deadline = time.monotonic() + wait_s
    while (mark := _locked(path)) is None:
        if time.monotonic() > deadline:
            holder = _holder(path) or "another folder"
            raise EngineError(
                f"engine {url}: the run in {holder} holds this server. Take it out there, or name another one."
            )
        time.sleep(RETRY_S)
    with mark:
        mark.truncate(0)
        mark.write(f"{run_dir}\n")
        mark.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str] | None:
    """Returns the open file with its lock, or None if another process has the lock or has just removed the file."""
    with ExitStack() as undo:
        mark = undo.enter_context(path.open("a+"))
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not _is(mark, path):
            return None
        undo.pop_all()
        return mark


def _is(mark: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(mark.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""

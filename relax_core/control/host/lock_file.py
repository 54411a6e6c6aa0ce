"""Marks a folder with its owner by a file lock, which the kernel releases when the owner's last process exits.

A process id would not do: the kernel reuses process ids, and a container that shares the folder has its own ones.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

OWNER_FILE = "owner"


@contextmanager
def owned(folder: Path, owner: str) -> Iterator[None]:
    """Marks a new folder on a local disk as owned by this process and its forks, until the block or the last one ends.

    ``owner`` is a text for people, written to the owner file. The file appears when it is locked already, so a folder
    without it is still being made.
    """
    partial = folder / f".{OWNER_FILE}"
    with partial.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{owner}\n")
        file.flush()
        partial.rename(folder / OWNER_FILE)
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Yields True if the folder's owner, a process of this user, has exited.

    The block then holds the folder's lock. Other processes that try to claim the folder meanwhile get False.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        yield False
        return
    try:
        file = (folder / OWNER_FILE).open()
    except FileNotFoundError:
        yield False
        return
    with file:
        yield locked(file)


def locked(file: IO[str]) -> bool:
    """Takes the file's lock for this process and its forks.

    Returns False if another process holds it.

    Raises OSError (such as ENOLCK) if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_owner(folder: Path) -> str:
    """Returns the text that `owned` wrote to the owner file."""
    return (folder / OWNER_FILE).read_text().strip()

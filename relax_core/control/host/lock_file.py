"""A folder that tells whether its owner lives: by a lock that the kernel lets go with the owner's last process.

A number of a process would not tell: numbers come again, and a container that shares the folder has numbers of its own.
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
def owned(folder: Path, words: str) -> Iterator[None]:
    """Marks a new folder on a local disk as this process's, and its forks', until the block or the last of them ends.

    ``words`` go into the owner file, for people. It appears once it is locked: a folder without it is being made.
    """
    partial = folder / f".{OWNER_FILE}"
    with partial.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{words}\n")
        file.flush()
        partial.rename(folder / OWNER_FILE)
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether ``folder`` is a dead owner's, of this user. While the block runs nobody else is told the same."""
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
    """Takes the file's lock, for this process and its forks, unless somebody holds it. Raises OSError (ENOLCK and the
    like) where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner_words(folder: Path) -> str:
    """What `owned` was told."""
    return (folder / OWNER_FILE).read_text().strip()

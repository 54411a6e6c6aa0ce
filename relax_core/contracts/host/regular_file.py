"""Opens files that a user or a download names, and refuses what is no plain file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Opens a plain file for reading; links are followed.

    It never waits for another process, as opening a named pipe does. Raises ValueError for anything but a plain file,
    and OSError for a file that cannot be opened.
    """
    if (kind := _other_kind(os.stat(path).st_mode)) is not None:  # to open a device may have an effect
        raise ValueError(f"{path} is {kind}, not a plain file. Give a plain file.")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if (kind := _other_kind(os.fstat(descriptor).st_mode)) is not None:  # it was replaced in between
        os.close(descriptor)
        raise ValueError(f"{path} is {kind}, not a plain file. Give a plain file.")
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path) -> None:
    """Raises as `open_regular` does, for a file that a library opens by its path."""
    open_regular(path).close()


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """Returns the content of a plain file.

    Raises as `open_regular` does, and ValueError for a file with more than ``most_bytes`` bytes, of which nothing is
    read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(content)) > most_bytes:
        found = max(size, len(content))
        raise ValueError(f"{path} has {found} bytes, and at most {most_bytes} are read. Give a smaller file.")
    return content


def _other_kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file")

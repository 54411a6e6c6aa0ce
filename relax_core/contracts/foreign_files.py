"""Reads files that somebody else may have made: plain files alone, within a number of bytes and of values.

A file is opened without waiting and without following a link, and what is read is what was opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

MOST_VALUES = 500_000  # of a JSON text: a value takes some 100 bytes of memory, however short it is
Value = TypeVar("Value")


class NotPlain(ValueError):
    """The path is no plain file, such as a pipe, a socket, a folder or a link."""


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file for reading. Raises NotPlain for anything else, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise NotPlain(f"{path.name} is no plain file: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(f"{path.name} is no plain file")
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, *, most_bytes: int) -> bytes:
    """Returns the content of a plain file. Raises ValueError if it has more than ``most_bytes`` bytes, and OSError."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path.name} has more than {most_bytes} bytes, which is more than is read of it")
    return data


def decode_json(data: bytes, decoder: msgspec.json.Decoder[Value]) -> Value:
    """Returns the value of a JSON text. Raises ValueError for one that is damaged, too deep or of too many values."""
    values = data.count(b",") + data.count(b"{") + data.count(b"[")
    if values > MOST_VALUES:
        raise ValueError(f"a JSON text has about {values} values; at most {MOST_VALUES} are read")
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"a JSON text cannot be read: {error}") from error

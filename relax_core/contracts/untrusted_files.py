"""Opens and reads untrusted files safely, and escapes hidden characters in untrusted text.

The path may come from a user, a download or another process. Therefore this module opens only plain files and limits
the number of bytes and values that it reads. It shows characters that a terminal or a browser would interpret or hide
by their codes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

MAX_VALUES = 500_000  # limit for a JSON text, because even a short value takes some 100 bytes of memory
Value = TypeVar("Value")


class NotPlain(ValueError):
    """The path is not a plain file but, for example, a pipe, a socket, a folder or a link."""


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file for reading. Raises NotPlain if the path is not a plain file, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise NotPlain(f"{path.name} is not a plain file: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(f"{path.name} is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_plain_file(path: Path, *, max_bytes: int) -> bytes:
    """Returns the content of a plain file.

    Raises ValueError if the file has more than ``max_bytes`` bytes, and OSError.
    """
    with open_plain(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes, the limit for this file")
    return data


def decode_json(data: bytes, decoder: msgspec.json.Decoder[Value]) -> Value:
    """Returns the value of a JSON text. Raises ValueError if the text is damaged or has too many levels or values."""
    values = data.count(b",") + data.count(b"{") + data.count(b"[")
    if values > MAX_VALUES:
        raise ValueError(f"a JSON text has about {values} values; at most {MAX_VALUES} are read")
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"a JSON text cannot be read: {error}") from error


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Opens a plain file for reading; links are followed.

    This function never waits for another process, as an open of a named pipe would. Raises ValueError if the path is no
    plain file, and OSError for a file that cannot be opened.
    """
    if (kind := _other_kind(os.stat(path).st_mode)) is not None:  # an open of a device may have side effects
        raise ValueError(f"{path} is {kind}, not a plain file. Give a plain file.")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if (kind := _other_kind(os.fstat(descriptor).st_mode)) is not None:  # the file was replaced in the meantime
        os.close(descriptor)
        raise ValueError(f"{path} is {kind}, not a plain file. Give a plain file.")
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path) -> None:
    """Checks a file that a library will open by path. Raises as `open_regular` does."""
    open_regular(path).close()


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Returns the content of a plain file.

    Raises as `open_regular` does. Raises ValueError for a file with more than ``max_bytes`` bytes, without reading it.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        found = max(size, len(content))
        raise ValueError(f"{path} has {found} bytes, and at most {max_bytes} are read. Give a smaller file.")
    return content


def _other_kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file")


# Control characters except tab and newline, zero-width characters, characters that change the text direction, line
# separators, halves of surrogate pairs, tags and other invisible format characters.
_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def shown(text: str) -> str:
    """Replaces each hidden character in ``text`` by its code, such as ``U+202E``; tab and newline stay."""
    return _HIDDEN.sub(lambda match: f"U+{ord(match[0]):04X}", text)


def shown_json(text: str) -> str:
    """Replaces each hidden character in a JSON text by a JSON escape; only strings in the text can contain them."""
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def shown_line(text: str) -> str:
    """Returns ``text`` as `shown` does, in one line, with spaces for newlines."""
    return shown(text.replace("\n", " "))

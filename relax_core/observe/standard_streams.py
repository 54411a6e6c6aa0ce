"""Replaces the standard streams by streams that do not raise, do not block a run, and escape hidden characters.

Output is dropped if it is not read: the reader may have exited (``… | head -1``, ``… | tee log`` after Ctrl-C), the
terminal may be closed, or a pager may have stopped reading. This module imports little, because the entry point uses it
before all other imports.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from relax_core.contracts.untrusted_files import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

RUN_TIMEOUT_S = 1.0  # a run drops output after the reader has read nothing for this time
PIECE_BYTES = 4096  # bytes that a pipe accepts without waiting if it is ready for writing (PIPE_BUF)
UNWRITABLE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # the reader, terminal or descriptor has closed


class ShownStream(io.TextIOWrapper):
    """Escapes hidden characters, which could move the cursor or change the text direction.

    ``unfiltered`` writes text unchanged, for `ShownConsole`.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.unfiltered = _Unfiltered(self)

    def write(self, text: str) -> int:
        """Writes a text. Returns the length of the text."""
        super().write(shown(text))
        return len(text)


class _Unfiltered:
    def __init__(self, stream: ShownStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class UnreadFile(io.RawIOBase):
    """Writes to a file descriptor, and drops output that cannot be written.

    `write` always reports success. After the reader has closed, all output is dropped. If the reader reads nothing for
    ``timeout_s`` seconds, output is dropped until the reader reads again. With ``timeout_s=None``, `write` waits for
    the reader.
    """

    def __init__(self, descriptor: int, name: str, *, timeout_s: float | None) -> None:
        self.name = name  # libraries read this attribute of standard streams
        self.timeout_s = timeout_s
        self._descriptor = descriptor
        self._dropped = 0  # bytes since the last successful write

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Returns True."""
        return True

    def isatty(self) -> bool:
        """Returns whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Buffer) -> int:
        """Writes or drops ``data``, and returns its size in bytes. A note about dropped output is written first."""
        rest = memoryview(data)
        size = rest.nbytes
        if self._dropped:
            line = f"relax: {self._dropped} bytes of output are left out here, because they were not read\n"
            if self._write_piece(line.encode()):
                self._dropped = 0
        while rest and self._write_piece(rest[:PIECE_BYTES]):
            rest = rest[PIECE_BYTES:]
        self._dropped += len(rest)
        return size

    def _write_piece(self, piece: bytes | memoryview) -> bool:
        """Returns whether the whole piece was written. Waits at most ``timeout_s`` seconds before each write."""
        timeout_s = 0.0 if self._dropped else self.timeout_s
        try:
            while piece:
                if not select.select([], [self._descriptor], [], timeout_s)[1]:
                    return False
                piece = piece[os.write(self._descriptor, piece) :]
        except OSError as error:
            if error.errno in UNWRITABLE:
                _point_to_null(self._descriptor)  # so other writers of the descriptor do not fail either
            return False
        return True


@contextmanager
def unread_streams(*, timeout_s: float | None = None) -> Iterator[None]:
    """Replaces stdout and stderr by `UnreadFile` objects while the block runs. Unread output then raises no error.

    `UnreadFile` describes ``timeout_s``. If descriptor 0, 1 or 2 is closed, it is opened on /dev/null. Otherwise
    another file would get its number. A stream that was already replaced, as in a notebook, stays.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _point_to_null(descriptor)
    before = sys.stdout, sys.stderr
    with ExitStack() as undo:
        sys.stdout = _unread(sys.stdout, sys.__stdout__, 1, timeout_s, undo)
        sys.stderr = _unread(sys.stderr, sys.__stderr__, 2, timeout_s, undo)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def write_as_it_is(code: str) -> None:
    """Writes a terminal code of Relax to stdout unescaped."""
    getattr(sys.stdout, "unfiltered", sys.stdout).write(code)
    sys.stdout.flush()


def show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught error like `sys.excepthook`, but escapes hidden characters."""
    print(shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _unread(
    now: TextIO | None, original: TextIO | None, descriptor: int, timeout_s: float | None, undo: ExitStack
) -> TextIO:
    raw = getattr(getattr(now, "buffer", None), "raw", None)
    if now is not None and isinstance(raw, UnreadFile):  # this block is inside another block
        undo.callback(setattr, raw, "timeout_s", raw.timeout_s)
        raw.timeout_s = timeout_s
        return now
    if now is not None and now is not original:
        return now
    if now is not None:
        now.flush()
    file = UnreadFile(descriptor, "<stdout>" if descriptor == 1 else "<stderr>", timeout_s=timeout_s)
    encoding = "utf-8" if now is None else now.encoding
    return ShownStream(io.BufferedWriter(file), encoding=encoding, errors="backslashreplace", line_buffering=True)


def _point_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)  # child processes inherit standard descriptors
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)

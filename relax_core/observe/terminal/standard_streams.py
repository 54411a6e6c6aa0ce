"""Standard streams that never fail, and need not hold up a run: what nobody reads is dropped.

A reader may end first (``… | head -1``, ``… | tee log`` after Ctrl-C), a terminal may close, a pager may stand still.
Nothing here imports more than the standard library: the entry point uses it before anything else.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

RUN_TIMEOUT_S = 1.0  # a reader that takes nothing for so long misses what a run writes, until it reads again
PIECE_BYTES = 4096  # a pipe that is ready for writing takes so much without waiting (PIPE_BUF)
GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # no reader, no terminal, no descriptor: for good


class UnreadFile(io.RawIOBase):
    """A descriptor, of which `write` always says that all was written. It drops what cannot be written: all that
    follows once the reader is gone, else what comes while the reader has taken nothing for ``timeout_s`` seconds;
    with None it waits for the reader."""

    def __init__(self, descriptor: int, name: str, *, timeout_s: float | None) -> None:
        self.name = name  # libraries ask their standard streams for it
        self.timeout_s = timeout_s
        self._descriptor = descriptor
        self._dropped = 0  # bytes since the reader took some

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer) -> int:
        rest = memoryview(data)
        size = rest.nbytes
        if self._dropped:
            note = f"relax: {self._dropped} bytes of output are left out here: nobody read them\n"
            if self._take(note.encode()):
                self._dropped = 0
        while rest and self._take(rest[:PIECE_BYTES]):
            rest = rest[PIECE_BYTES:]
        self._dropped += len(rest)
        return size

    def _take(self, piece: bytes | memoryview) -> bool:
        """Whether the reader took the piece, or its beginning. It is waited for once."""
        timeout_s = 0.0 if self._dropped else self.timeout_s
        try:
            while piece:
                if not select.select([], [self._descriptor], [], timeout_s)[1]:
                    return False
                piece = piece[os.write(self._descriptor, piece) :]
        except OSError as error:
            if error.errno in GONE:
                _point_to_null(self._descriptor)  # also for whatever else writes there
            return False
        return True


@contextmanager
def unread_streams(*, timeout_s: float | None = None) -> Iterator[None]:
    """While the block runs, output that nobody reads raises nothing; `UnreadFile` tells what ``timeout_s`` is.

    Descriptors 0, 1 and 2 that are closed are opened on /dev/null, so that no other file gets their numbers. A stream
    that somebody has put in the place of a standard one, as a notebook does, is left alone.
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


def _unread(
    now: TextIO | None, original: TextIO | None, descriptor: int, timeout_s: float | None, undo: ExitStack
) -> TextIO:
    raw = getattr(getattr(now, "buffer", None), "raw", None)
    if now is not None and isinstance(raw, UnreadFile):  # within another such block
        undo.callback(setattr, raw, "timeout_s", raw.timeout_s)
        raw.timeout_s = timeout_s
        return now
    if now is not None and now is not original:
        return now
    if now is not None:
        now.flush()
    file = UnreadFile(descriptor, "<stdout>" if descriptor == 1 else "<stderr>", timeout_s=timeout_s)
    encoding = "utf-8" if now is None else now.encoding
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors="backslashreplace", line_buffering=True)


def _point_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)  # inheritable, as standard descriptors are
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)

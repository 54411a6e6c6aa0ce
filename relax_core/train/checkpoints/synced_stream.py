"""Writes checkpoint files that reach the disk while they are written, so that their growth shows the disk's progress.

Without this the kernel buffers a large part of the file in memory. The file has its full length at once, and then no
progress is visible for as long as the disk takes (`CheckpointStore.progress`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystem

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SYNC_BYTES = 256 << 20


class SyncedFiles(FileSystem):
    """Opens synced streams for `torch.distributed.checkpoint.FileSystemWriter`."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a synced stream for writing, and torch's own stream for reading."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SyncedStream(io.FileIO(path, "wb")) as stream:
            yield stream


class _SyncedStream(io.BufferedWriter):
    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._unsynced = 0

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        self._unsynced += written
        if self._unsynced >= SYNC_BYTES:
            self.flush()
            os.fdatasync(self.fileno())
            self._unsynced = 0
        return written

"""A log file for the output of child processes that stops growing at a limit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_READ_BYTES = 1 << 16


class LimitedLog:
    """Appends what is written to ``descriptor`` to a file, up to ``most_bytes``, and reads and drops what follows.

    So a process that floods its output neither waits for a reader nor fills the disk. Without a ``path`` everything is
    dropped.
    """

    def __init__(self, path: Path | None, *, most_bytes: int) -> None:
        self._path = path
        self._left = most_bytes
        self._reader, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._drain, daemon=True, name="output of workers")
        self._thread.start()

    def close(self) -> None:
        """Closes the descriptor; the file is complete when the processes that have it have ended."""
        os.close(self.descriptor)

    def _drain(self) -> None:
        while part := os.read(self._reader, _READ_BYTES):
            if self._path is None or not self._left:
                continue
            written = part[: self._left]
            self._left -= len(written)
            with self._path.open("ab") as file:
                file.write(written)
                if not self._left:
                    file.write(b"\n[the log has reached its limit; further output is dropped]\n")
        os.close(self._reader)

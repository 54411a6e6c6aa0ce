"""Keeps sounds and videos of a run as playable files for the run's samples page, within limits."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from relax_core.contracts.media import MediaError, MediaItem, MediaSource
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.source_files import open_source, sniffed_format

# The first items are all kept; then one item is kept per interval. The interval is 2 s at first and doubles after every
# 500 kept items.
ALL_OF, PAUSE_S, DOUBLED_EACH, MAX_KEPT = 64, 2.0, 500, 4000


class KeptRate:
    """Decides for each item whether to keep it. This limits the cost of kept items to 1% of a core."""

    def __init__(self) -> None:
        self._kept, self._next = 0, 0.0

    def takes(self) -> bool:
        """Returns whether this item is kept."""
        now = time.monotonic()
        if self._kept >= MAX_KEPT or (self._kept >= ALL_OF and now < self._next):
            return False
        self._next = now + PAUSE_S * 2 ** (self._kept // DOUBLED_EACH)
        self._kept += 1
        return True


log = logging.getLogger(__name__)
MAX_FILE_BYTES, MAX_BYTES = 8_000_000, 256_000_000  # limits of one file, and of all files of one process
HEAD_BYTES = 32  # number of first bytes that show a file's format
TYPES = {
    "WAV": "audio/wav",
    "FLAC": "audio/flac",
    "OGG": "audio/ogg",
    "MP3": "audio/mpeg",
    "mov": "video/mp4",
    "matroska": "video/webm",
}


class PlayedFiles:
    """Copies sources of sounds and videos into ``folder``, each in a thread; a file's name is the item's digest.

    All sources are kept until they have half of `MAX_BYTES`; then a selection (`KeptRate`) is kept, up to `MAX_BYTES`.
    A file above `MAX_FILE_BYTES` is not kept. If a file cannot be read or written, it is missing on the page, and the
    run continues.
    """

    def __init__(self, folder: Path, *, root: Path, limits: MediaLimits) -> None:
        self._folder, self._root, self._limits = folder, root, limits
        self._rate = KeptRate()
        self._lock = threading.Lock()
        self._bytes = 0

    def add(self, item: MediaItem, source: MediaSource) -> None:
        """Starts to copy the source of an item, if the item is kept."""
        file = self._folder / item.digest
        if item.kind == "image" or self._bytes >= MAX_BYTES or file.exists():
            return
        if self._bytes < MAX_BYTES // 2 or self._rate.takes():
            threading.Thread(target=self._copy, args=(source, file), daemon=True, name="played-file").start()

    def _copy(self, source: MediaSource, file: Path) -> None:
        try:
            with open_source(source, self._limits, root=self._root).file as opened:
                data = opened.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}")
            part.write_bytes(data)
            os.replace(part, file)
        except (MediaError, OSError) as error:
            log.warning("a sound or video cannot be kept for the page: %s. The run goes on.", error)
            return
        with self._lock:
            self._bytes += len(data)


def played_type(file: Path) -> str | None:
    """Returns the MIME type of a kept file, such as "audio/wav", by its first bytes; None for unknown content."""
    with file.open("rb") as opened:
        return TYPES.get(sniffed_format(opened.read(HEAD_BYTES)))

"""Writes small pictures of a run's media items, for people who inspect prompts or samples."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np

from relax_core.contracts.media import MediaItem
from relax_core.contracts.media_file import FolderReader
from relax_core.data.media.played_files import KeptRate

log = logging.getLogger(__name__)
THUMBNAILS = "thumbnails"  # folder of the thumbnails in the run's folder
MOST, SIDE = 16, 160  # number of files, and the longest side of a picture in pixels
FRAMES = 4  # frames of a video that a picture shows side by side
PICTURE_SIDE, QUALITY, PICTURE_SUFFIX = 320, 80, ".jpg"  # settings of the pictures of samples


class Thumbnails:
    """Writes small pictures of media items; each picture is written in a thread.

    The first ``first`` items are written as PNG files to ``folder``; the file names begin with the item's number. With
    the folder ``pictures``, items are written there as JPEG files, named by digest: all early items and a part of the
    later items. This costs a run at most 1% of a core and some 100 MB.
    """

    def __init__(self, folder: Path, media_folder: Path, *, first: int = MOST, pictures: Path | None = None) -> None:
        self._folder, self._reader, self._first, self._pictures = folder, FolderReader(media_folder), first, pictures
        self._count, self._rate = 0, KeptRate()

    def add(self, item: MediaItem) -> None:
        """Starts to write the pictures of an item, if the item is chosen; the item's file must exist."""
        wanted: list[tuple[Path, int]] = []
        if self._count < self._first:
            wanted.append((self._folder / f"{self._count:02d}-{item.kind}-{item.digest[:8]}.png", SIDE))
            self._count += 1
        if self._pictures is not None:
            picture = self._pictures / f"{item.digest}{PICTURE_SUFFIX}"
            if not picture.exists() and self._rate.takes():
                wanted.append((picture, PICTURE_SIDE))
        if wanted:
            tensors = self._reader.tensors(item)  # the pages stay mapped after the file is removed
            frames = tensors["frames"] if "frames" in tensors else _spectrogram(tensors["features"])
            threading.Thread(target=_write, args=(frames, wanted), daemon=True, name="thumbnail").start()


def _write(frames: np.ndarray, wanted: list[tuple[Path, int]]) -> None:
    try:
        _save(frames, wanted)
    except OSError as error:
        log.warning("a small picture cannot be written: %s. The run goes on.", error)


def _save(frames: np.ndarray, wanted: list[tuple[Path, int]]) -> None:
    from PIL import Image

    shown = frames[np.linspace(0, len(frames) - 1, min(FRAMES, len(frames))).astype(int)]
    whole = Image.fromarray(np.concatenate(list(shown), axis=1))
    for path, side in wanted:
        picture = whole.copy()
        picture.thumbnail((side * len(shown), side))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}")
        picture.save(part, format="JPEG" if path.suffix == PICTURE_SUFFIX else "PNG", quality=QUALITY)
        os.replace(part, path)


def _spectrogram(features: np.ndarray) -> np.ndarray:
    """Returns a sound's features as a picture, high frequencies at the top, uint8 ``[1, mel bins, frames, 3]``."""
    least, most = float(features.min()), float(features.max())
    grey = (255 * (features[::-1] - least) / max(most - least, 1e-6)).astype(np.uint8)
    return np.repeat(grey[None, :, :, None], 3, axis=3)

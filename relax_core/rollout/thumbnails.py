"""Writes the first items of a run as small pictures, for a person who looks at its prompts."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from relax_core.contracts.media import MediaItem
from relax_core.contracts.media_file import FolderReader

THUMBNAILS = "thumbnails"  # their folder in the run's folder
MOST, SIDE = 16, 160  # files, and the longest side of one in pixels
FRAMES = 4  # of a video, side by side


class Thumbnails:
    """Writes a PNG for each of the first `MOST` items, in a thread; the name begins with the item's number."""

    def __init__(self, folder: Path, media_folder: Path) -> None:
        self._folder, self._reader, self._count = folder, FolderReader(media_folder), 0

    def add(self, item: MediaItem) -> None:
        """Begins to write the thumbnail of an item whose file is there, unless there are enough."""
        if self._count < MOST:
            name = f"{self._count:02d}-{item.kind}-{item.digest[:8]}.png"
            self._count += 1
            tensors = self._reader.tensors(item)  # the pages stay mapped if the file is removed meanwhile
            frames = tensors["frames"] if "frames" in tensors else _spectrogram(tensors["features"])
            threading.Thread(target=self._write, args=(frames, name), daemon=True, name="thumbnail").start()

    def _write(self, frames: np.ndarray, name: str) -> None:
        from PIL import Image

        shown = frames[np.linspace(0, len(frames) - 1, min(FRAMES, len(frames))).astype(int)]
        picture = Image.fromarray(np.concatenate(list(shown), axis=1))
        picture.thumbnail((SIDE * len(shown), SIDE))
        self._folder.mkdir(exist_ok=True)
        picture.save(self._folder / name)


def _spectrogram(features: np.ndarray) -> np.ndarray:
    """Returns a sound's features as a picture with the high frequencies above, uint8 ``[1, mel bins, frames, 3]``."""
    least, most = float(features.min()), float(features.max())
    grey = (255 * (features[::-1] - least) / max(most - least, 1e-6)).astype(np.uint8)
    return np.repeat(grey[None, :, :, None], 3, axis=3)

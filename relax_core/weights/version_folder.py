"""The folder of published weight versions: what the trainer writes there and removes, and how others read from it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from relax_core.contracts.engine import WeightManifest
from relax_core.weights.digested_json import decode_digested, encode_digested

KEPT_VERSIONS = 2  # a reader that has just read the newest manifest must still find its file
LATEST = "latest.json"
PUSHED = "pushed.json"
READER = "reader-"  # the start of a mark's name; the reader's name follows, and its content is the version
REMOVED = ".removed"  # the end of the name of a version that is about to go
READS = 5  # of a file that looks damaged: a network's file system may show half of one that was just replaced
READ_AGAIN_S = 0.1

Content = TypeVar("Content")


class PublishedUnreadable(RuntimeError):
    """A file of the folder of published weights is damaged; the text names it."""


def read_latest(folder: Path) -> WeightManifest | None:
    """The newest published version, or None before the first. Raises `PublishedUnreadable` where the file that says so
    is damaged, also when it is read again."""
    return _read(folder / LATEST, type=WeightManifest)


def read_pushed(folder: Path) -> int:
    """The newest version whose push has ended, well or not; -1 before the first. An engine that has not answered an
    older version's push had no part in it. Raises as `read_latest` does."""
    pushed = _read(folder / PUSHED, type=int)
    return -1 if pushed is None else pushed


def _read(path: Path, *, type: type[Content]) -> Content | None:
    for attempt in range(READS):
        if attempt:
            time.sleep(READ_AGAIN_S)
        try:
            return decode_digested(path.read_bytes(), type=type)
        except FileNotFoundError:
            return None
        except ValueError as damaged:
            problem = damaged
    raise PublishedUnreadable(
        f"{path} is damaged: {problem}. The next version of the weights replaces it."
    ) from problem


@contextmanager
def reading(folder: Path, *, reader: str) -> Iterator[WeightManifest]:
    """Gives the newest published version, and keeps its file from being removed until the block ends. ``reader`` names
    the one who reads; it reads one version at a time. To be used after the first version was published. Raises
    FileNotFoundError where the newest version's file is gone."""
    mark = folder / f"{READER}{reader}"
    latest, gone = None, None
    try:
        while latest is None:
            newest = read_latest(folder)
            assert newest is not None, "nothing was published yet"
            _replace(mark, newest.version)
            if Path(newest.path).exists():
                latest = newest
            elif newest == gone:
                raise FileNotFoundError(f"weights version {newest.version} is the newest, and {newest.path} is gone")
            else:
                gone = newest  # newer versions had replaced it before the mark was there
        yield latest
    finally:
        mark.unlink(missing_ok=True)


class VersionFolder:
    """The trainer's hold of the folder. ``folder`` is made where it does not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[int, Path] = {}  # those that are there, the oldest first
        folder.mkdir(parents=True, exist_ok=True)

    def new(self, version: int) -> Path:
        """The folder of a new version, which from now on is the newest."""
        home = self._folder / f"{version:08d}"
        home.mkdir(exist_ok=True)
        self._versions[version] = home
        return home

    def replace(self, name: str, content: object) -> None:
        """Writes a file of the folder, whole or not at all."""
        _replace(self._folder / name, content)

    def remove_old(self, *, keep: Collection[int]) -> None:
        """Removes the versions but the newest `KEPT_VERSIONS`, those in ``keep``, and those that somebody reads."""
        for version in list(self._versions)[:-KEPT_VERSIONS]:
            if version not in keep and self._remove(version):
                del self._versions[version]

    def _remove(self, version: int) -> bool:
        """False where somebody reads it. A reader makes its mark first and then looks for the file, so the folder is
        renamed before the marks are looked at: of the two one sees the other."""
        home = self._versions[version]
        gone = home.with_suffix(REMOVED)
        home.rename(gone)
        if version in self._marked():
            gone.rename(home)
            return False
        shutil.rmtree(gone, ignore_errors=True)  # a cluster's disk may still hold an open file
        return True

    def _marked(self) -> set[int]:
        """The versions that somebody reads."""
        found = set()
        for mark in self._folder.glob(f"{READER}*"):
            try:
                found.add(decode_digested(mark.read_bytes(), type=int))
            except FileNotFoundError:  # its reader has just ended
                continue
            except ValueError:  # half of a mark, on a network's file system: it may be of any version
                return set(self._versions)
        return found


def _replace(path: Path, content: object) -> None:
    partial = path.with_name(f".{path.name}.partial")  # no mark of a reader
    partial.write_bytes(encode_digested(content))
    os.replace(partial, path)

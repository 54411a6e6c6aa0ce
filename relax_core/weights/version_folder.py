"""Manages the folder of published weight versions: the trainer writes, other processes read.

The small files in the folder are JSON with a digest of their content: ``{"digest": …, "content": …}``. The digest is
the xxh3-128 of the content's bytes, in hexadecimal. It detects damage but does not protect against an attacker.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from relax_core.contracts.engine import WeightManifest

Content = TypeVar("Content")


class _Digested(msgspec.Struct, frozen=True):
    digest: str
    content: msgspec.Raw


def encode_digested(content: object, *, indent: int | None = None) -> bytes:
    """Encodes content and its digest as a file's bytes. ``indent``: spaces per level, None for one line."""
    data = msgspec.json.encode(content)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    return b'{"digest": "%s",\n"content": %s}\n' % (xxhash.xxh3_128_hexdigest(data).encode(), data)


def decode_digested(data: bytes, *, type: type[Content]) -> Content:
    """Decodes a file's bytes and returns the content. For damaged bytes, raises ValueError with the problem."""
    try:
        file = msgspec.json.decode(data, type=_Digested)
        found = xxhash.xxh3_128_hexdigest(file.content)
        if found != file.digest:
            raise ValueError(f"its digest does not agree: {found}, but it was written with {file.digest}")
        return msgspec.json.decode(file.content, type=type)
    except msgspec.DecodeError as error:  # A ValidationError is a DecodeError.
        raise ValueError(str(error)) from error


KEPT_VERSIONS = 2  # A reader that has just read the newest manifest must still find the version's file.
LATEST = "latest.json"
PUSHED = "pushed.json"
READER = "reader-"  # A read mark is a file named prefix + reader's name; it contains the version that is being read.
REMOVAL = ".removal"  # An empty file with a version's name and this suffix marks the version as being removed.
READS = 5  # Attempts to read a damaged file: network file systems may show half of a file while it is replaced.
READ_AGAIN_S = 0.1


class PublishedUnreadable(RuntimeError):
    """Reports a damaged file in the folder of published weights; the text names the file."""


def read_latest(folder: Path) -> WeightManifest | None:
    """Returns the manifest of the newest published version; None if no version was published yet.

    Raises `PublishedUnreadable` if the file is still damaged after several reads.
    """
    return read_digested(folder / LATEST, type=WeightManifest)


def read_pushed(folder: Path) -> int:
    """Returns the newest version with an ended push, successful or not; -1 if no push has ended yet.

    An engine that has not answered the push of an older version did not get this version. Raises the errors of
    `read_latest`.
    """
    pushed = read_digested(folder / PUSHED, type=int)
    return -1 if pushed is None else pushed


def read_digested(path: Path, *, type: type[Content]) -> Content | None:
    """Returns the content of a file that `replace_digested` wrote; None if the file does not exist.

    Raises `PublishedUnreadable` if the file is still damaged after several reads.
    """
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
    """Yields the manifest of the newest published version and protects its file from removal until the block ends.

    ``reader`` is the unique name of the reader, which may read one version at a time. At least one version must be
    published. Raises FileNotFoundError if the file of the newest version is missing.
    """
    mark = folder / f"{READER}{reader}"
    latest, missing = None, None
    try:
        while latest is None:
            newest = read_latest(folder)
            assert newest is not None, "no version was published yet"
            replace_digested(mark, newest.version)
            if _stays(Path(newest.path)):
                latest = newest
            elif newest == missing:
                raise FileNotFoundError(f"weights version {newest.version} is the newest, but {newest.path} is missing")
            else:
                missing = newest  # The version was removed before the mark was written; a newer version exists.
        yield latest
    finally:
        mark.unlink(missing_ok=True)


def _stays(file: Path) -> bool:
    """Returns whether a version's file exists and is not being removed. A reader calls this after writing its mark.

    The removal is checked before the file: after the end of a removal, its mark and the file are gone.
    """
    return not file.parent.with_suffix(REMOVAL).exists() and file.exists()


class VersionFolder:
    """Writes and removes versions in ``folder``; creates a missing folder. Only one writer may exist at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path for path in folder.iterdir() if path.name.isdecimal())
        self._versions = {int(path.name): path for path in there}  # the versions that exist, oldest first

    def new(self, version: int) -> Path:
        """Creates and returns the folder of a new version, which becomes the newest version."""
        target = self._folder / f"{version:08d}"
        target.with_suffix(REMOVAL).unlink(missing_ok=True)  # left by a trainer that was killed during a removal
        target.mkdir(exist_ok=True)
        self._versions[version] = target
        return target

    def replace(self, name: str, content: object) -> None:
        """Writes a file in the folder. The file appears only when it is complete."""
        replace_digested(self._folder / name, content)

    def remove_old(self, *, keep: Collection[int]) -> None:
        """Removes old versions. Keeps the newest `KEPT_VERSIONS`, ``keep``, and all versions that are being read."""
        for version in list(self._versions)[:-KEPT_VERSIONS]:
            if version not in keep and self._remove(version):
                del self._versions[version]

    def _remove(self, version: int) -> bool:
        """Removes a version, or returns False if it is being read.

        A reader first writes its mark, then checks for a removal. This method first marks the removal, then reads the
        readers' marks. Therefore the reader detects the removal, or this method detects the reader. The files of a kept
        version are never moved.
        """
        folder = self._versions[version]
        removal = folder.with_suffix(REMOVAL)
        removal.touch()
        if version in self._marked():
            removal.unlink()
            return False
        shutil.rmtree(folder, ignore_errors=True)  # A network file system may still hold an open file.
        if not folder.exists():
            removal.unlink()
        return True

    def _marked(self) -> set[int]:
        """Returns the versions that are being read."""
        found = set()
        for mark in self._folder.glob(f"{READER}*"):
            try:
                found.add(decode_digested(mark.read_bytes(), type=int))
            except FileNotFoundError:  # The reader has just ended.
                continue
            except ValueError:  # A half-written mark on a network file system may name any version.
                return set(self._versions)
        return found


def replace_digested(path: Path, content: object) -> None:
    """Writes a file with a digest of its content. The file appears at ``path`` only when it is complete."""
    partial = path.with_name(f".{path.name}.partial")  # This name cannot be confused with a read mark.
    partial.write_bytes(encode_digested(content))
    os.replace(partial, path)

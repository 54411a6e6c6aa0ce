"""Checks and removes the files of media items, in the order in which the bus process asks for it.

The bus process moves no bytes of an item: a rollout worker writes the file, and readers map it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

REMOVAL_CHECK_S = 1.0
SWEEP_S = 30.0  # interval of the search for files that nobody named
UNNAMED_S = 120.0  # a file whose writer died before it held the item is removed this long after it was written


class MediaFolder(Protocol):
    """Is a folder with the files of items; each method awaits work outside of the bus's event loop."""

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests that have no file."""

    async def unlink(self, names: Iterable[str]) -> None:
        """Removes files, and ignores those that are not there."""

    async def older_than(self, seconds: float) -> list[str]:
        """Returns the names of all files that were last written more than ``seconds`` ago."""


class LocalFolder:
    """Is a folder that this process can read, used in threads. It implements `MediaFolder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests that have no file."""
        return await asyncio.to_thread(missing_files, self._folder, digests)

    async def unlink(self, names: Iterable[str]) -> None:
        """Removes files, and ignores those that are not there."""
        await asyncio.to_thread(unlink_files, self._folder, names)

    async def older_than(self, seconds: float) -> list[str]:
        """Returns the names of all files that were last written more than ``seconds`` ago."""
        return await asyncio.to_thread(old_files, self._folder, seconds)


class MediaFiles:
    """Checks and removes the files of a folder, without making the bus's event loop wait for them.

    A digest is removed and checked in one order: `missing` waits until the file is gone if its removal has begun, so
    that a worker never relies on a file that is about to be removed.
    """

    def __init__(self, folder: MediaFolder) -> None:
        self._folder = folder
        self._waiting: dict[str, None] = {}  # to be removed
        self._removing: frozenset[str] = frozenset()
        self._removal: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None

    def remove(self, digests: Iterable[str]) -> None:
        """Begins to remove the files of items."""
        self._waiting |= dict.fromkeys(digests)
        if self._removal is None or self._removal.done():
            self._removal = asyncio.get_running_loop().create_task(self._remove())

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests that have no file. Files that were still to be removed stay."""
        for digest in digests:
            self._waiting.pop(digest, None)
        while self._removal is not None and not self._removing.isdisjoint(digests):
            await asyncio.wait([self._removal], timeout=REMOVAL_CHECK_S)
        return await self._folder.missing(digests)

    def keep_sweeping(self, named: Container[str]) -> None:
        """Removes files that nobody named from time to time: those of workers that died before they held the items."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self._sweep_unnamed(named))

    async def _remove(self) -> None:
        while self._waiting:
            self._removing, self._waiting = frozenset(self._waiting), {}
            await self._folder.unlink(self._removing)
            self._removing = frozenset()

    async def _sweep_unnamed(self, named: Container[str]) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep(named)

    async def sweep(self, named: Container[str]) -> None:
        """Removes the files that nobody named within `UNNAMED_S` seconds after they were written."""
        old = await self._folder.older_than(UNNAMED_S)
        if unnamed := [name for name in old if name not in named]:
            self.remove(unnamed)


def missing_files(folder: Path, digests: Sequence[str]) -> list[str]:
    """Returns the digests that have no file in a folder."""
    return [digest for digest in digests if not (folder / digest).exists()]


def unlink_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files of a folder, and ignores those that are not there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def old_files(folder: Path, seconds: float) -> list[str]:
    """Returns the names of all files of a folder that were last written more than ``seconds`` ago."""
    old = []
    limit = time.time() - seconds
    with suppress(FileNotFoundError):  # the folder of a run that is ending
        for file in folder.iterdir():
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < limit:
                    old.append(file.name)
    return old

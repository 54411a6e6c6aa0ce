"""Stores the tensors of media items for the bus process, as files of one host or as objects of Ray's store.

The bus process moves no bytes of an item: a rollout worker writes the file or the object, and readers map it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.bus import BusTimeout
from relax_core.contracts.media import MediaItem
from relax_core.contracts.media_file import read_item

REMOVAL_CHECK_S = 1.0
SWEEP_S = 30.0  # interval of the search for files that nobody named
UNNAMED_S = 120.0  # a file whose writer died before it held the item is removed this long after it was written


@dataclass(frozen=True)
class ObjectRefs:
    """Is an answer of the bus process that consists of object refs."""

    refs: tuple[Any, ...]


class MediaFiles:
    """Checks and removes the files of a folder in threads, so that the bus's event loop never waits for them.

    A digest is removed and checked in one order: `missing` waits until the file is gone if its removal has begun, so
    that a worker never relies on a file that is about to be removed.
    """

    def __init__(self, folder: Path) -> None:
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
        return await asyncio.to_thread(_missing, self._folder, digests)

    def keep_sweeping(self, named: Container[str]) -> None:
        """Removes files that nobody named from time to time: those of workers that died before they held the items."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self._sweep_unnamed(named))

    async def _remove(self) -> None:
        while self._waiting:
            self._removing, self._waiting = frozenset(self._waiting), {}
            await asyncio.to_thread(_unlink, self._folder, self._removing)
            self._removing = frozenset()

    async def _sweep_unnamed(self, named: Container[str]) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep(named)

    async def sweep(self, named: Container[str]) -> None:
        """Removes the files that nobody named within `UNNAMED_S` seconds after they were written."""
        old = await asyncio.to_thread(_old_files, self._folder, older_than=time.time() - UNNAMED_S)
        if unnamed := [name for name in old if name not in named]:
            self.remove(unnamed)


class MediaObjects:
    """Holds the references to the objects of items, which this process owns, so that they outlive their writers."""

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}

    async def take_files(
        self, folder: str, digests: list[str], *, node_id: str, named: Container[str], timeout_s: float
    ) -> list[str]:
        """Moves the files of items on a node into objects, and returns the digests that have no file.

        Raises `BusTimeout` after ``timeout_s`` seconds.
        """
        on_its_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        # Ray must not read a file a second time, because the first task has removed it.
        task: Any = ray.remote(num_cpus=0, max_retries=0, num_returns=1 + len(digests))(_take_files)
        answers: list[Any] = task.options(scheduling_strategy=on_its_node).remote(folder, digests)
        try:
            taken: list[str] = await asyncio.wait_for(answers[0], timeout_s)
        except TimeoutError:
            raise BusTimeout(
                f"the files of {len(digests)} media items on node {node_id} did not become objects of Ray's store "
                f"within {timeout_s:.1f} s: is the store or the node overloaded?"
            ) from None
        except WorkerCrashedError:  # the files may be gone, so that the rollout worker writes them again
            taken = []
        there = dict(zip(digests, answers[1:], strict=True))
        self._refs |= {digest: there[digest] for digest in taken if digest in named}
        return [digest for digest in digests if digest not in self._refs]

    def find(self, digests: Sequence[str]) -> ObjectRefs:
        """Returns the objects of items. Raises ValueError for one that is not there."""
        for digest in digests:
            if digest not in self._refs:
                raise ValueError(f"media {digest}: the bus has no such item.")
        return ObjectRefs(tuple(self._refs[digest] for digest in digests))

    def remove(self, digests: Iterable[str]) -> None:
        """Frees the objects of items; the memory is free once no reader maps it any more."""
        for digest in digests:
            self._refs.pop(digest, None)

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests that have no object."""
        return [digest for digest in digests if digest not in self._refs]

    def keep_sweeping(self, named: Container[str]) -> None:
        """Does nothing, because an object that nobody named was never given to the bus."""


class ObjectReader:
    """Maps objects of Ray's store. It implements `MediaReader`.

    ``find`` returns the content of an item's file by digest, a uint8 array of the store, or raises ValueError.
    """

    def __init__(self, find: Callable[[str], np.ndarray]) -> None:
        self._find = find

    def tensors(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """Returns read-only views of an item's tensors by name; the object stays mapped while one is referenced."""
        return read_item(self._find(item.digest).data)[1]


def stored_media(settings: BusSettings) -> MediaFiles | MediaObjects | None:
    """Returns the storage that the settings name, or None for a run without media."""
    if not settings.media_folder:
        return None
    return MediaObjects() if settings.media_objects else MediaFiles(Path(settings.media_folder))


def _take_files(folder: str, digests: list[str]) -> list[Any]:
    """Returns the digests whose files are there, then the content of each file or None; the files are removed.

    Ray executes it as a task of the bus process on the node of the files. The caller of a task owns what it returns, so
    the objects outlive the rollout worker, and their bytes stay on this node.
    """
    contents: list[np.ndarray | None] = []
    for digest in digests:
        path = Path(folder) / digest
        try:
            contents.append(np.asarray(np.memmap(path, dtype=np.uint8, mode="r")))
            path.unlink()
        except FileNotFoundError:
            contents.append(None)
    return [[digest for digest, one in zip(digests, contents, strict=True) if one is not None], *contents]


def _missing(folder: Path, digests: Sequence[str]) -> list[str]:
    return [digest for digest in digests if not (folder / digest).exists()]


def _unlink(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _old_files(folder: Path, *, older_than: float) -> list[str]:
    """Returns the names of all files that were last written before ``older_than``, in seconds since the epoch."""
    old = []
    with suppress(FileNotFoundError):  # the folder of a run that is ending
        for file in folder.iterdir():
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < older_than:
                    old.append(file.name)
    return old

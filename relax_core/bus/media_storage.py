"""Checks, copies and removes the files of media items for the bus process, on one node or several nodes.

The content of an item does not pass through the bus process: a rollout worker writes the item's file, and readers map
the file. With several nodes, each node has a folder in shared memory, and a rollout worker writes to the folder of its
node. When a process on another node needs the item, the actor `NodeMedia` of that node fetches the content through
Ray's object store and writes a file with the same name. Engines, trainers and rewards can therefore map files on every
node.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_core.contracts.bus import BusLost, BusTimeout
from relax_core.contracts.media import MediaGone
from relax_core.contracts.media_file import node_folder

REMOVAL_CHECK_S = 1.0
SWEEP_S = 30.0  # interval between two searches for files without references
UNNAMED_S = 120.0  # age at which a file without references is removed, because its writer has died


class MediaFolder(Protocol):
    """Declares a folder with the files of items. Methods do their work outside the bus's event loop."""

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests without a file."""

    async def unlink(self, names: Iterable[str]) -> None:
        """Removes files and ignores missing files."""

    async def older_than(self, seconds: float) -> list[str]:
        """Returns the names of the files that were last written more than ``seconds`` ago."""


class LocalFolder:
    """Implements `MediaFolder` for a folder that this process can read; file operations run in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests without a file."""
        return await asyncio.to_thread(missing_files, self._folder, digests)

    async def unlink(self, names: Iterable[str]) -> None:
        """Removes files and ignores missing files."""
        await asyncio.to_thread(unlink_files, self._folder, names)

    async def older_than(self, seconds: float) -> list[str]:
        """Returns the names of the files that were last written more than ``seconds`` ago."""
        return await asyncio.to_thread(old_files, self._folder, seconds)


class MediaFiles:
    """Checks and removes the files of a folder in background tasks of the bus's event loop.

    If the removal of a file has begun, `missing` waits until the file is gone. A worker therefore never uses a file
    that is being removed.
    """

    def __init__(self, folder: MediaFolder) -> None:
        self._folder = folder
        self._waiting: dict[str, None] = {}  # digests with a pending removal
        self._removing: frozenset[str] = frozenset()
        self._removal: asyncio.Task[None] | None = None
        self._sweep: asyncio.Task[None] | None = None

    def remove(self, digests: Iterable[str]) -> None:
        """Starts to remove the files of items."""
        self._waiting |= dict.fromkeys(digests)
        if self._removal is None or self._removal.done():
            self._removal = asyncio.get_running_loop().create_task(self._remove())

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests without a file. Cancels pending removals of these digests."""
        for digest in digests:
            self._waiting.pop(digest, None)
        while self._removal is not None and not self._removing.isdisjoint(digests):
            await asyncio.wait([self._removal], timeout=REMOVAL_CHECK_S)
        return await self._folder.missing(digests)

    def keep_sweeping(self, named: Container[str]) -> None:
        """Starts the periodic removal of files without references; their writers died before they called `hold`."""
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
        """Removes files that are older than `UNNAMED_S` seconds and have no reference."""
        old = await self._folder.older_than(UNNAMED_S)
        if unnamed := [name for name in old if name not in named]:
            self.remove(unnamed)


def missing_files(folder: Path, digests: Sequence[str]) -> list[str]:
    """Returns the digests without a file in a folder."""
    return [digest for digest in digests if not (folder / digest).exists()]


def unlink_files(folder: Path, names: Iterable[str]) -> None:
    """Removes files of a folder and ignores missing files."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


def old_files(folder: Path, seconds: float) -> list[str]:
    """Returns the names of the files in a folder that were last written more than ``seconds`` ago."""
    old = []
    limit = time.time() - seconds
    with suppress(FileNotFoundError):  # the run is ending and has removed its folder
        for file in folder.iterdir():
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < limit:
                    old.append(file.name)
    return old


START_S = 60.0  # maximum seconds until a process on another node replies
FILE_CALLS, COPIES = 4, 4  # concurrent calls of a node's process; copies have separate slots, so that reads do not wait

# The shell's background process outlives the process that owns the folder, even if its whole process group is killed.
_REMOVE_AT_END = 'exec 3<&0; (trap "" TERM HUP INT; cat <&3 >/dev/null; rm -rf -- "$1") &'


class NodeMedia:
    """Owns the media folder of a node, as a Ray actor. The folder is removed when the actor ends."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700)
        self._ends_with_this = _remove_at_end(self._folder)

    def missing(self, digests: list[str]) -> list[str]:
        """Returns the digests without a file on this node."""
        return missing_files(self._folder, digests)

    def unlink(self, names: list[str]) -> None:
        """Removes files."""
        unlink_files(self._folder, names)

    def older_than(self, seconds: float) -> list[str]:
        """Returns the names of the files that were last written more than ``seconds`` ago."""
        return old_files(self._folder, seconds)

    def read(self, digest: str) -> np.ndarray | None:
        """Returns the content of an item's file, uint8 ``[bytes]``; None if the file is missing on this node."""
        try:
            return np.asarray(np.memmap(self._folder / digest, dtype=np.uint8, mode="r"))
        except FileNotFoundError:
            return None

    @ray.method(concurrency_group="copies")
    def copy(self, digests: list[str], source: Any, timeout_s: float) -> list[str]:
        """Copies items from the node of ``source``, and returns the digests that are missing there.

        The copies in Ray's object store are freed as soon as the files are written. Raises GetTimeoutError after
        ``timeout_s`` seconds.
        """
        contents = ray.get([source.read.remote(digest) for digest in digests], timeout=timeout_s)
        for digest, content in zip(digests, contents, strict=True):
            if content is not None:
                part = self._folder / f"{digest}.{os.getpid()}.part"
                with part.open("wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(content.data)
                part.rename(self._folder / digest)
        return [digest for digest, content in zip(digests, contents, strict=True) if content is None]


class NodeFolder:
    """Implements `MediaFolder` for the folder of another node, through that node's `NodeMedia` actor."""

    def __init__(self, node_id: str, folder: Path) -> None:
        on_its_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        # Ray's type annotations lack concurrency groups.
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"copies": COPIES}}
        remote: Any = ray.remote(**options)(NodeMedia)
        self.process: Any = remote.options(scheduling_strategy=on_its_node, max_concurrency=FILE_CALLS).remote(
            str(node_folder(folder, node_id))
        )
        self._node_id = node_id

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the digests without a file. Raises `BusLost` if the node's process has exited."""
        return list(await self.answer(self.process.missing.remote(list(digests)), START_S))

    async def unlink(self, names: Iterable[str]) -> None:
        """Removes files. Ignores errors: if the node's process has exited, its files are already removed."""
        with suppress(BusLost, BusTimeout):
            await self.answer(self.process.unlink.remote(list(names)), START_S)

    async def older_than(self, seconds: float) -> list[str]:
        """Returns the names of the files that were last written more than ``seconds`` ago."""
        try:
            return list(await self.answer(self.process.older_than.remote(seconds), START_S))
        except (BusLost, BusTimeout):
            return []

    async def answer(self, reference: Any, timeout_s: float) -> Any:
        """Returns the reply of the node's process. Raises `BusLost` if the process has exited, else `BusTimeout`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except TimeoutError:
            raise BusTimeout(
                f"the process that keeps the media items of node {self._node_id} did not answer within "
                f"{timeout_s:.1f} s: is the node or Ray's object store overloaded?"
            ) from None
        except (ActorDiedError, ActorUnavailableError) as error:
            raise BusLost(
                f"the process that keeps the media items of node {self._node_id} has exited: "
                f"{str(error).splitlines()[0]}"
            ) from error
        except RayError as error:
            raise BusLost(f"media items did not reach node {self._node_id}: {str(error).splitlines()[-1]}") from error


class MediaNodes:
    """Tracks which nodes have the file of an item, copies files to other nodes, and removes files on all nodes.

    ``folder`` is the run's media folder; the folders of the nodes are next to it (`node_folder`). ``named`` contains
    the items with references. All methods must be called in the bus's event loop.
    """

    def __init__(self, folder: Path, named: Container[str]) -> None:
        self._folder = folder
        self._named = named
        self._nodes: dict[str, tuple[NodeFolder, MediaFiles]] = {}
        self._places: dict[str, dict[str, None]] = {}  # digest → nodes with its file; the writer's node is first
        self._copying: dict[tuple[str, str], asyncio.Task[None]] = {}  # (digest, node) → task that copies the file

    async def open(self, node_id: str) -> None:
        """Waits until a node's folder exists. Raises `BusLost` or `BusTimeout` on failure."""
        await self._files(node_id).missing([])

    async def missing(self, digests: Sequence[str], *, node_id: str) -> list[str]:
        """Returns the digests without a file on a node. Records that the node has the files of all other digests."""
        missing = await self._files(node_id).missing(digests)
        self._record([digest for digest in digests if digest not in missing], node_id)
        return missing

    async def fetch(self, digests: Sequence[str], *, node_id: str, timeout_s: float) -> None:
        """Waits until a node has the files of items. Copies missing files; concurrent calls share a copy.

        Raises `MediaGone` for an item without references or without a file on any node, and `BusTimeout` after
        ``timeout_s`` seconds.
        """
        while True:
            for digest in digests:
                if digest not in self._named:
                    raise MediaGone(f"media {digest}: the bus has no such item.")
            lacking = [digest for digest in dict.fromkeys(digests) if node_id not in self._places.get(digest, ())]
            if not lacking:
                return
            copies = {self._copying[digest, node_id] for digest in lacking if (digest, node_id) in self._copying}
            if copies:  # after other calls' copies, checks again: they may have failed
                await asyncio.wait(copies, timeout=timeout_s)
                continue
            task = asyncio.get_running_loop().create_task(self._copy(lacking, node_id, timeout_s=timeout_s))
            self._copying |= dict.fromkeys([(digest, node_id) for digest in lacking], task)
            await task

    def remove(self, digests: Iterable[str]) -> None:
        """Starts to remove the files of items on all nodes."""
        of_nodes: dict[str, list[str]] = {}
        for digest in digests:
            for node_id in self._places.pop(digest, ()):
                of_nodes.setdefault(node_id, []).append(digest)
        for node_id, own in of_nodes.items():
            self._files(node_id).remove(own)

    def _files(self, node_id: str) -> MediaFiles:
        """Returns the files of a node. The first call for a node starts the node's process."""
        if node_id not in self._nodes:
            folder = NodeFolder(node_id, self._folder)
            self._nodes[node_id] = folder, MediaFiles(folder)
            self._nodes[node_id][1].keep_sweeping(self._named)
        return self._nodes[node_id][1]

    def _record(self, digests: Sequence[str], node_id: str) -> None:
        """Records that a node has the files of items, and removes the files of items that have lost all references."""
        for digest in digests:
            self._places.setdefault(digest, {})[node_id] = None
        self.remove([digest for digest in digests if digest not in self._named])

    async def _copy(self, digests: Sequence[str], node_id: str, *, timeout_s: float) -> None:
        try:
            # `missing` cancels a pending removal of a file on this node, or waits until the file is gone.
            absent = await self._files(node_id).missing(digests)
            self._record([digest for digest in digests if digest not in absent], node_id)
            of_sources: dict[str, list[str]] = {}
            for digest in absent:
                if not (places := self._places.get(digest)):
                    raise MediaGone(f"media {digest}: no node has it.")
                of_sources.setdefault(next(iter(places)), []).append(digest)
            target = self._nodes[node_id][0]
            for source, own in of_sources.items():
                copy = target.process.copy.remote(own, self._nodes[source][0].process, timeout_s)
                gone = await target.answer(copy, timeout_s)
                self._record([digest for digest in own if digest not in gone], node_id)
                if gone:
                    raise MediaGone(f"media {gone[0]}: node {source} no longer has it.")
        finally:
            for digest in digests:
                del self._copying[digest, node_id]


def _remove_at_end(folder: Path) -> Any:
    """Starts a process that removes the folder when this process exits; returns the pipe that signals the exit."""
    command = ["/bin/sh", "-c", _REMOVE_AT_END, "sh", str(folder)]
    shell = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    shell.wait(timeout=START_S)  # the background process stays
    return shell.stdin

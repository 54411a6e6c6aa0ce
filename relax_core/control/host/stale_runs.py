"""What runs leave that were killed with their supervisor: processes, folders under /tmp and in shared memory.

A folder says itself whether its run lives (`lock_file`); a process of a run has that folder in its environment, or
writes its log there: Ray's agents outlive a killed raylet, as each holds the pipe that the other watches.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_core.control.host.lock_file import claimed, owner_words
from relax_core.control.host.process_trees import kill_trees
from relax_core.control.host.run_paths import FOLDER_PREFIX, SHARED_MEMORY, WEIGHTS_PREFIX, temporary_folder
from relax_core.engines.sglang.server.scratch import remove_left_scratch


@dataclass(frozen=True, kw_only=True)
class StaleRun:
    """``folder``: of a dead run. ``owner``: in words. ``pids``: its processes that still run."""

    folder: Path
    owner: str
    pids: tuple[int, ...]

    def __str__(self) -> str:
        alive = f" and processes {', '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.folder}{alive} of {self.owner}, which was killed"


def find_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Of this user's dead runs. ``temporary``: None is where runs of this environment make their folders."""
    return list(_each(temporary, shared_memory, lambda stale_run: None))


def remove_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Ends and removes them; returns what it was. Nothing of a living run or of another user is touched."""
    return list(_each(temporary, shared_memory, _remove))


def _each(temporary: Path | None, shared_memory: Path, then: Callable[[StaleRun], None]) -> Iterator[StaleRun]:
    temporary = temporary_folder() if temporary is None else temporary
    folders = [*sorted(temporary.glob(f"{FOLDER_PREFIX}*")), *sorted(shared_memory.glob(f"{WEIGHTS_PREFIX}*"))]
    for folder in folders:
        with suppress(FileNotFoundError), claimed(folder) as dead:  # its run may be ending, and remove it
            if dead:
                stale_run = StaleRun(folder=folder, owner=owner_words(folder), pids=processes_of(folder))
                then(stale_run)
                yield stale_run


def _remove(stale_run: StaleRun) -> None:
    pids = stale_run.pids
    while pids:
        kill_trees(pids)
        pids = processes_of(stale_run.folder)  # what they had started meanwhile
    remove_left_scratch(stale_run.folder)
    shutil.rmtree(stale_run.folder)


def processes_of(folder: Path) -> tuple[int, ...]:
    """This user's processes that have ``folder`` in their environment, or write to a file in it."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile, or not ours to read
            if process.name.isdecimal() and process.stat().st_uid == os.getuid() and _is_of(process, folder):
                found.append(int(process.name))
    return tuple(sorted(found))


def _is_of(process: Path, folder: Path) -> bool:
    """``process``: its folder in /proc. What gives itself a title, as Ray's processes do, writes it over a part of its
    environment, or over nearly all."""
    if str(folder).encode() in (process / "environ").read_bytes():
        return True
    written = (file for file in (process / "fd").iterdir() if file.lstat().st_mode & stat.S_IWUSR)
    return any(os.readlink(file).startswith(f"{folder}/") for file in written)

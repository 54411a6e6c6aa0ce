"""Finds and removes stale runs: processes and temporary folders of runs that were killed with their supervisor.

The lock of a folder says whether its run still exists (`lock_file`). A process belongs to a run if it has the run's
folder in its environment or writes its log there. Ray's agents outlive a killed raylet, because each agent holds the
pipe that the other one watches.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from relax_core.contracts.process_trees import kill_trees
from relax_core.control.host.lock_file import claimed, read_owner
from relax_core.control.host.run_paths import FOLDER_PREFIX, SHARED_MEMORY, WEIGHTS_PREFIX, temporary_folder
from relax_core.engines.sglang.scratch import remove_left_scratch


@dataclass(frozen=True, kw_only=True)
class StaleRun:
    """Describes a temporary folder of a killed run.

    ``owner`` describes the run. ``pids`` are its processes that still exist. ``problem`` says why the folder could not
    be removed; it is empty otherwise.
    """

    folder: Path
    owner: str
    pids: tuple[int, ...]
    problem: str = ""

    def __str__(self) -> str:
        alive = f" and processes {', '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.folder}{alive} of {self.owner}, which was killed"

    def removal(self) -> str:
        """Returns a line that says whether the folder was removed."""
        return f"{self} cannot be removed: {self.problem}. Remove it by hand." if self.problem else f"removed {self}"


def find_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Returns this user's stale runs. With ``temporary=None`` it searches `temporary_folder`."""
    return list(_each(temporary, shared_memory, lambda stale_run: stale_run))


def remove_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Kills and removes this user's stale runs, and returns them; of each, ``problem`` says why its folder stays.

    It changes no other run.
    """
    return list(_each(temporary, shared_memory, _remove))


def remove_left_weights(run_dir: Path) -> None:
    """Removes weights in a run's folder that an earlier command left there because it was killed.

    Call it before the run publishes, while this command holds the run's lock. A file that a network file system still
    holds stays: the run publishes into a folder of another name.
    """
    for folder in run_dir.glob(f"{WEIGHTS_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _each(temporary: Path | None, shared_memory: Path, then: Callable[[StaleRun], StaleRun]) -> Iterator[StaleRun]:
    temporary = temporary_folder() if temporary is None else temporary
    folders = [*sorted(temporary.glob(f"{FOLDER_PREFIX}*")), *sorted(shared_memory.glob(f"{WEIGHTS_PREFIX}*"))]
    for folder in folders:
        with suppress(FileNotFoundError), claimed(folder) as stale:  # a run that is ending may remove the folder
            if stale:
                yield then(StaleRun(folder=folder, owner=read_owner(folder), pids=processes_of(folder)))


def _remove(stale_run: StaleRun) -> StaleRun:
    pids = stale_run.pids
    while pids:
        kill_trees(pids)
        pids = processes_of(stale_run.folder)  # the killed processes may have started others
    remove_left_scratch(stale_run.folder)
    try:
        shutil.rmtree(stale_run.folder)
    except OSError as error:  # such as a protected file; the other stale runs are removed
        return replace(stale_run, problem=str(error))
    return stale_run


def processes_of(folder: Path) -> tuple[int, ...]:
    """Returns the ids of this user's processes that have ``folder`` in their environment or write to a file in it.

    It reads /proc because psutil's environ() stops at the first empty entry, and a process that has set its own title
    has empty entries in its environment.
    """
    found = []
    for process in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has exited, or may not be read
            if process.name.isdecimal() and process.stat().st_uid == os.getuid() and _is_of(process, folder):
                found.append(int(process.name))
    return tuple(sorted(found))


def _is_of(process: Path, folder: Path) -> bool:
    """Is True if the process with the folder ``process`` in /proc belongs to the run with the temporary ``folder``.

    A process that sets its own title, as Ray's processes do, overwrites a part of its environment, or nearly all of it.
    """
    if str(folder).encode() in (process / "environ").read_bytes():
        return True
    written = (file for file in (process / "fd").iterdir() if file.lstat().st_mode & stat.S_IWUSR)
    return any(os.readlink(file).startswith(f"{folder}/") for file in written)

"""Manages a run's folders on this machine: makes temporary folders, locks them and run.dir, and removes stale runs.

A file lock shows that a folder has an owner; the kernel releases the lock when the owner's last process exits. A
process id would not be sufficient, because the kernel reuses process ids, and a container that shares the folder has
different process ids.

A stale run was killed together with its supervisor. A process belongs to a stale run if it has the run's folder in its
environment, or has a writable file open there. Ray's two agents outlive a killed raylet: each agent watches a pipe,
which the other agent keeps open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from relax_core.contracts.process_trees import kill_trees
from relax_core.engines.sglang.scratch import remove_left_scratch

OWNER_FILE = "owner"
LOCK_FILE = ".lock"
POLL_S = 0.2
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX, WEIGHTS_PREFIX = "rlx-", "relax-"
BASE_BYTES = 26  # a socket path has at most 107 bytes, and Ray's names below a run's folder are long


# -- The locks ---------------------------------------------------------------------------------------------------------
@contextmanager
def owned(folder: Path, owner: str) -> Iterator[None]:
    """Marks a new folder on a local disk as owned by this process and its forks, until the block or the last fork ends.

    ``owner`` is a readable text for the owner file. The file appears only after it is locked. So a folder without an
    owner file is still being created.
    """
    partial = folder / f".{OWNER_FILE}"
    with partial.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{owner}\n")
        file.flush()
        partial.rename(folder / OWNER_FILE)
        yield


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Yields True if the folder's owner, a process of this user, has exited.

    The block then has the folder's lock. During the block, other processes that try to claim the folder get False.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        yield False
        return
    try:
        file = (folder / OWNER_FILE).open()
    except FileNotFoundError:
        yield False
        return
    with file:
        yield locked(file)


def locked(file: IO[str]) -> bool:
    """Locks the file for this process and its forks. Returns False if another process has locked the file.

    Raises OSError (such as ENOLCK) if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_owner(folder: Path) -> str:
    """Returns the text that `owned` wrote to the owner file."""
    return (folder / OWNER_FILE).read_text().strip()


@contextmanager
def run_lock(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Locks the folder for this process and its forks, until the block or the last fork ends.

    Raises ValueError, which names the other process, if another run still uses the folder after ``wait_s`` seconds. If
    the file system has no locks, prints a warning and continues.
    """
    deadline = time.monotonic() + wait_s
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            while not locked(file):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise ValueError(
                        f"run.dir={folder}: another run uses it, {file.read().strip()}. Wait until it has ended, or "
                        "choose another run.dir."
                    )
                time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"relax: run.dir={folder} cannot be locked: make sure that no second run uses it", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield


# -- The temporary folders ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Holds the temporary paths of one attempt of a run.

    All folders have mode 0700. ``folder`` is for Ray's files and token; its path is short because socket paths are
    limited. ``weights_folder`` is for published weights. ``token_folder`` is for the run's bearer token, which every
    process of the run can read. ``namespace`` is the run's namespace in Ray.
    """

    folder: Path
    weights_folder: Path
    token_folder: Path
    namespace: str


def temporary_folder() -> Path:
    """Returns the parent of the temporary folders: TMPDIR, or /tmp if TMPDIR's path is too long for sockets."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= BASE_BYTES else Path("/tmp")


@contextmanager
def run_paths(*, run_dir: Path, shared: bool = False) -> Iterator[RunPaths]:
    """Creates the temporary folders for one attempt of the run in ``run_dir``, and removes them when the block ends.

    If the whole run is killed, the folders remain, and their owner files have the owner's name (`owned`). With
    ``shared``, weights and token are in ``run_dir``, which all nodes of the run share; otherwise the weights are in
    this machine's shared memory.
    """
    owner = f"the run in {run_dir} (process {os.getpid()} of {socket.gethostname()})"
    namespace = f"{WEIGHTS_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=temporary_folder()))
        undo.enter_context(owned(folder, owner))
        # Errors are ignored, because a Ray daemon may still write its last log line.
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(remove_left_scratch, folder)
        weights_folder = (run_dir if shared else SHARED_MEMORY) / namespace
        weights_folder.mkdir(mode=0o700, parents=shared)
        if not shared:  # a shared disk may have no locks
            undo.enter_context(owned(weights_folder, f"{owner}, beside {folder}"))
            # Copies of weights for external servers, if servers joined.
            undo.callback(shutil.rmtree, run_dir / namespace, ignore_errors=True)
        undo.callback(shutil.rmtree, weights_folder, ignore_errors=shared)  # a network file system may keep a file
        token_folder = weights_folder if shared else folder
        yield RunPaths(folder=folder, weights_folder=weights_folder, token_folder=token_folder, namespace=namespace)


# -- Stale runs --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class StaleRun:
    """Describes a temporary folder of a killed run.

    ``owner`` describes the run. ``pids`` are the run's remaining processes. ``problem`` is the reason why the folder
    could not be removed, "" if it was removed.
    """

    folder: Path
    owner: str
    pids: tuple[int, ...]
    problem: str = ""

    def __str__(self) -> str:
        alive = f" and processes {', '.join(map(str, self.pids))}" if self.pids else ""
        return f"{self.folder}{alive} of {self.owner}, which was killed"

    def removal(self) -> str:
        """Returns a line about the removal of the folder, or about the failure of the removal."""
        return f"{self} cannot be removed: {self.problem}. Remove it by hand." if self.problem else f"removed {self}"


def find_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Returns this user's stale runs. With ``temporary=None`` it searches `temporary_folder`."""
    return list(_each(temporary, shared_memory, lambda stale_run: stale_run))


def remove_stale_runs(*, temporary: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[StaleRun]:
    """Kills and removes this user's stale runs. Returns them, with ``problem`` set for folders that remain.

    Running runs are not changed.
    """
    return list(_each(temporary, shared_memory, _remove))


def remove_left_weights(run_dir: Path) -> None:
    """Removes weights that a killed command left in a run's folder.

    Call this function before the run publishes, while this command has the run's lock. Files that a network file system
    keeps may remain; this is harmless, because the run publishes into a folder with another name.
    """
    for folder in run_dir.glob(f"{WEIGHTS_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _each(temporary: Path | None, shared_memory: Path, then: Callable[[StaleRun], StaleRun]) -> Iterator[StaleRun]:
    temporary = temporary_folder() if temporary is None else temporary
    folders = [*sorted(temporary.glob(f"{FOLDER_PREFIX}*")), *sorted(shared_memory.glob(f"{WEIGHTS_PREFIX}*"))]
    for folder in folders:
        with suppress(FileNotFoundError), claimed(folder) as stale:  # an ending run may remove the folder
            if stale:
                yield then(StaleRun(folder=folder, owner=read_owner(folder), pids=processes_of(folder)))


def _remove(stale_run: StaleRun) -> StaleRun:
    pids = stale_run.pids
    while pids:
        kill_trees(pids)
        pids = processes_of(stale_run.folder)  # the killed processes may have started new processes
    remove_left_scratch(stale_run.folder)
    try:
        shutil.rmtree(stale_run.folder)
    except OSError as error:  # for example for a protected file; all further stale runs are still removed
        return replace(stale_run, problem=str(error))
    return stale_run


def processes_of(folder: Path) -> tuple[int, ...]:
    """Returns the ids of this user's processes with ``folder`` in their environment or with a writable file in it.

    The function reads /proc because psutil's environ() stops at the first empty entry. The environment of a process
    that has set its title has empty entries.
    """
    found = []
    for process in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # the process has exited or is protected
            if process.name.isdecimal() and process.stat().st_uid == os.getuid() and _is_of(process, folder):
                found.append(int(process.name))
    return tuple(sorted(found))


def _is_of(process: Path, folder: Path) -> bool:
    """Returns whether a process (its folder in /proc) belongs to the run with the temporary ``folder``.

    A process that sets its title overwrites a part or nearly all of its environment. Ray's processes set their titles.
    """
    if str(folder).encode() in (process / "environ").read_bytes():
        return True
    written = (file for file in (process / "fd").iterdir() if file.lstat().st_mode & stat.S_IWUSR)
    return any(os.readlink(file).startswith(f"{folder}/") for file in written)

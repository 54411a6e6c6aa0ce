"""Limits a sandbox with a separate control group. The group counts all memory of the sandbox, also kernel memory.

Root can create a group, and also a user with a delegated part of the group tree. Otherwise there is no group. Then the
sandbox has only two kinds of limits: limits that the process inside sets for itself, and limits that the process
outside checks.
"""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PREFIX = "relax-sandbox-"
_LEFT_S = 60.0  # seconds; an older empty group was left by a killed process
_END_S = 10.0
_PAUSE_S = 5e-4  # the last process of a sandbox exits within about a millisecond
_TRY_S = 30.0
# The process enters the groups by itself before it runs the command. Otherwise it could start children earlier.
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True)
class _Base:
    """Holds a folder for new groups; ``version`` is 1 or 2, ``controllers`` are the active controllers."""

    folder: Path
    version: int
    controllers: frozenset[str]


class ControlGroup:
    """Manages one group of processes with limits; `remove` deletes the group after its processes have ended.

    ``memory_bytes`` limits anonymous and shared memory, files in memory, page tables, buffers of pipes and sockets, and
    kernel objects. This memory is not swapped. ``processes`` is the largest number of processes and threads.
    """

    def __init__(self, bases: tuple[_Base, ...], *, memory_bytes: int, processes: int) -> None:
        name = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns():x}-{next(_numbers)}"
        self._folders: list[tuple[_Base, Path]] = []
        try:
            for base in bases:
                (base.folder / name).mkdir()
                self._folders.append((base, base.folder / name))
                self._limit(base, base.folder / name, memory_bytes, processes)
        except OSError:
            self.remove()
            raise

    @property
    def enter(self) -> list[str]:
        """Returns a command prefix that makes a process enter the group."""
        return ["/bin/sh", "-c", _ENTER, "sh", *(str(folder / "cgroup.procs") for _, folder in self._folders), "--"]

    def out_of_memory(self) -> bool:
        """Returns whether the kernel has killed a process because the group had reached its memory limit."""
        for base, folder in self._folders:
            if "memory" in base.controllers:
                file = folder / ("memory.oom_control" if base.version == 1 else "memory.events")
                words = (line.split() for line in file.read_text().splitlines())
                return any(name == "oom_kill" and int(count) for name, count in words)
        return False

    def remove(self) -> None:
        """Removes the group. If the group stays busy for some seconds, a later process removes it."""
        until = time.monotonic() + _END_S
        for _, folder in self._folders:
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or time.monotonic() > until:
                        break
                    time.sleep(_PAUSE_S)
                else:
                    break

    @staticmethod
    def _limit(base: _Base, folder: Path, memory_bytes: int, processes: int) -> None:
        if "memory" in base.controllers:
            if base.version == 1:
                (folder / "memory.limit_in_bytes").write_text(str(memory_bytes))
                with suppress(FileNotFoundError, PermissionError):  # a kernel that does not count swap has no such file
                    (folder / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
            else:
                (folder / "memory.max").write_text(str(memory_bytes))
                with suppress(FileNotFoundError):  # a kernel without swap has no such file
                    (folder / "memory.swap.max").write_text("0")
        if "pids" in base.controllers:
            (folder / "pids.max").write_text(str(processes))


def make_control_group(*, memory_bytes: int, processes: int) -> ControlGroup | None:
    """Returns a new group, or None if this process cannot create groups."""
    bases = _usable_bases()
    return ControlGroup(bases, memory_bytes=memory_bytes, processes=processes) if bases else None


@cache
def _usable_bases() -> tuple[_Base, ...]:
    """Removes abandoned groups, and returns the folders for new groups; empty if a process cannot enter a group."""
    bases = tuple(_bases(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()))
    if not any("memory" in base.controllers for base in bases):
        return ()
    for base in bases:
        for left in base.folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):  # the group is in use, or another process has removed it
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.rmdir()
    try:
        group = ControlGroup(bases, memory_bytes=2**26, processes=8)
    except OSError:
        return ()
    try:
        entered = subprocess.run([*group.enter, "/bin/true"], timeout=_TRY_S, capture_output=True, check=False)
    finally:
        group.remove()
    return bases if entered.returncode == 0 else ()


def _bases(own: str, mounts: str) -> list[_Base]:
    """Returns the folders for groups, from the contents of /proc/self/cgroup and /proc/self/mountinfo.

    In version 1, the group of this process can have child groups. In version 2, it can have child groups only if it has
    no processes or is the root; otherwise new groups are created next to it.
    """
    found = []
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        controllers = frozenset(names.split(",")) & {"memory", "pids"}
        version = 1 if names else 2
        if (version == 1 and not controllers) or (folder := _mounted(path, names, mounts)) is None:
            continue
        if version == 1:
            if os.access(folder, os.W_OK):
                found.append(_Base(folder, 1, controllers))
            continue
        for candidate in (folder, folder.parent):
            with suppress(OSError):  # above the mounted tree, or not readable
                given = frozenset((candidate / "cgroup.subtree_control").read_text().split()) & {"memory", "pids"}
                if "memory" in given and os.access(candidate, os.W_OK):
                    found.append(_Base(candidate, 2, given))
                    break
    return found


def _mounted(path: str, names: str, mounts: str) -> Path | None:
    """Returns the folder of a group in the file system, or None if the group's tree is not mounted."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, folder = before.split()[3:5]
        kind, _, options = after.split()
        right = (
            kind == "cgroup2" if not names else kind == "cgroup" and set(names.split(",")) <= set(options.split(","))
        )
        if right and Path(path).is_relative_to(root):
            return Path(folder) / Path(path).relative_to(root)
    return None

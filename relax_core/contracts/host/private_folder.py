"""Makes and checks folders that no other user of this machine can enter, and the modes of the files of a run.

Every folder in which Relax keeps files of its own comes from here: those of runs, sweeps and evaluations, and the
user's cache, in which the run executes what it finds.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PRIVATE = 0o700
OTHERS = 0o077  # what members of the group and all others may do
OTHERS_WRITE = 0o022
MOST_LINKS = 40  # as many as the kernel follows in one path
_FULL_MAP = ["0", "0", "4294967295"]


def private_folder(path: Path, *, key: str) -> Path:
    """Makes the folder with mode 0700, with the parents that it needs, or checks that it is private; returns ``path``.

    A folder of this user that others may enter gets the mode 0700, and stderr says so. ``key`` is the setting that
    named the folder. Raises ValueError, with key, value and fix, if another user owns the folder, a parent, or a link
    on the way, if another user may replace a parent, or if everybody shares the folder. Raises OSError if the folder
    cannot be made.
    """
    named = f"{key}={path}"
    found = _walk(Path.cwd() / path, named)
    state = found.lstat()
    if state.st_uid != os.geteuid():
        raise ValueError(f"{named}: the folder belongs to user {state.st_uid}. Choose a folder of your own.")
    if state.st_mode & stat.S_ISVTX or found == Path("/"):
        raise ValueError(f"{named}: other users share this folder. Choose a folder below it.")
    if state.st_mode & OTHERS:
        _tighten(found)
        print(f"relax: {named}: other users could enter the folder; its mode is now 0700", file=sys.stderr)
    return path


def user_cache_root() -> Path:
    """Returns the path of Relax's folder in the user's cache: ``$XDG_CACHE_HOME/relax``, by default below ~/.cache."""
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax").resolve()


def user_cache(name: str) -> Path:
    """Returns the folder ``name`` in the user's cache; it is made, or checked, as `private_folder` does."""
    return _checked(user_cache_root()) / _made(user_cache_root() / name).name


@contextmanager
def private_files() -> Iterator[None]:
    """Lets this process and the processes that it starts make files with mode 0600 until the block ends."""
    earlier = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(earlier)


@contextmanager
def unshared_writes() -> Iterator[None]:
    """Lets this process make files that no other user can write; who may read them is left to the user's umask."""
    earlier = os.umask(OTHERS)
    os.umask(earlier | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(earlier)


@cache
def _checked(root: Path) -> Path:
    return private_folder(root, key="XDG_CACHE_HOME: cache")


def _made(folder: Path) -> Path:
    """Makes a folder in a private folder, or returns the one that is there."""
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    return folder


def _walk(path: Path, named: str) -> Path:
    """Makes what is missing of an absolute path, checks every folder above the last, and returns it without links."""
    left, current, links = list(reversed(path.parts[1:])), Path("/"), 0
    _check_parent(current, current.lstat(), named)
    while left:
        name = left.pop()
        if name == "..":
            current = current.parent
            continue
        entry = current / name
        state = _entry(entry)
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if not _is_trusted(state.st_uid):
                raise ValueError(f"{named}: user {state.st_uid} owns the link {entry}. Choose another folder.")
            target = Path(os.readlink(entry))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            current = Path("/") if target.is_absolute() else current
            continue
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(entry))
        if left:
            _check_parent(entry, state, named)
        current = entry
    return current


def _entry(entry: Path) -> os.stat_result:
    """Returns the state of what is at the path; a folder is made if nothing is."""
    try:
        return entry.lstat()
    except FileNotFoundError:
        _made_if_missing(entry)
        return entry.lstat()


def _made_if_missing(folder: Path) -> None:
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:  # another process has just made it, and its owner is checked as that of any other
        pass


def _check_parent(folder: Path, state: os.stat_result, named: str) -> None:
    """Raises ValueError if another user may rename what is in the folder."""
    if not _is_trusted(state.st_uid):
        raise ValueError(f"{named}: {folder} belongs to user {state.st_uid}, who may replace what is in it. {_ADVICE}")
    if state.st_mode & stat.S_ISVTX:
        return
    if state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and not _is_own_group(state.st_gid)):
        fix = f"chmod go-w {folder}" if state.st_uid == os.geteuid() else f"have chmod +t {folder} done by its owner"
        raise ValueError(f"{named}: other users may replace what is in {folder}. Use {fix}, or choose another folder.")


_ADVICE = "Choose a folder below one of your own."


def _is_trusted(uid: int) -> bool:
    """Says whether a folder's owner may replace what is in it: this user, and root.

    In a namespace without all users, such as that of a container, the owners that it lacks have one common number.
    """
    return uid in (0, os.geteuid()) or uid == _unmapped_user()


@cache
def _unmapped_user() -> int | None:
    if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _FULL_MAP:
        return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


@cache
def _is_own_group(gid: int) -> bool:
    """Says whether root or this user is the only member of a group, as many systems give each user such a group."""
    if gid == 0:
        return True
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:  # a number without a name: its members are unknown
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _tighten(folder: Path) -> None:
    """Sets the mode 0700 of a folder that is known to be no link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)

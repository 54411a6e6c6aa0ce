"""Creates and checks private folders, such as run folders and caches. Only this user can read, change or lock them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

MODE = 0o700
CACHE_KEY = "XDG_CACHE_HOME"
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch and Triton store compiled code below this folder
_OTHERS = 0o077  # the permissions of group and others
_ROOT = 0
_MAX_LINKS = 40  # largest number of links that the kernel follows in one path
_ALL_USERS = ["0", "0", str(2**32 - 1)]


def private_folder(folder: Path, *, key: str, exist_ok: bool = True) -> Path:
    """Makes a folder of mode 0700 with missing parents, or makes an existing folder private. Returns the folder.

    ``key`` names the setting in errors, and on stderr when the mode of an existing folder is changed. Raises
    ValueError, with key, value and fix, if another user could replace the folder: the folder, a parent or a link in the
    path belongs to another user, or all users may rename a parent. A folder below /tmp is allowed, because only the
    owner of a file in /tmp may rename the file. /tmp itself is refused, because all users share it. Raises
    FileExistsError if the folder exists and ``exist_ok`` is False, and OSError if the folder cannot be made.

    A group-writable parent is accepted: members of a group are trusted.
    """
    named = f"{key}={folder}"
    left, current, links = [*reversed((Path.cwd() / folder).parts[1:])], Path("/"), 0
    _check_parent(current, current.lstat(), named=named)
    while left:
        if (name := left.pop()) == "..":
            current = current.parent
            continue
        entry = current / name
        try:
            is_new, state = _made(entry)
        except OSError as error:
            what = "Relax's cache" if key == CACHE_KEY else "the folder"
            message = f"{error.strerror}: {named}: {what} cannot be made. Set {key} to a folder that you may write to"
            raise type(error)(error.errno, message, str(entry)) from error
        if stat.S_ISLNK(state.st_mode):
            links += 1
            target = _target(entry, state, named=named, links=links)
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            current = Path("/") if target.is_absolute() else current
            continue
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(entry))
        if left:
            _check_parent(entry, state, named=named)
        elif not is_new and not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(entry))
        current = entry
    _make_private(current, named=named)
    return folder


def _made(entry: Path) -> tuple[bool, os.stat_result]:
    """Makes a folder if the path does not exist. Returns whether it made the folder, and the path's lstat."""
    try:
        return False, entry.lstat()
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process has just made the folder; it is checked like any other folder
            entry.mkdir(mode=MODE)
            return True, entry.lstat()
        return False, entry.lstat()


def _target(link: Path, state: os.stat_result, *, named: str, links: int) -> Path:
    """Returns the target of a link that belongs to this user or to root; ``links`` counts the links of the path."""
    if links > _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(link))
    if state.st_uid not in (os.geteuid(), _ROOT, _missing_user()):
        raise ValueError(
            f"{named}: {link} is a link of another user (uid {state.st_uid}), who could change it. "
            "Choose another folder."
        )
    return Path(os.readlink(link))


def _check_parent(parent: Path, state: os.stat_result, *, named: str) -> None:
    """Raises ValueError if another user could rename entries of a folder."""
    # Root in a container may use a mounted folder that belongs to the user who started the container.
    if os.geteuid() != _ROOT and state.st_uid not in (os.geteuid(), _ROOT, _missing_user()):
        raise ValueError(
            f"{named}: {parent} belongs to another user (uid {state.st_uid}), who could replace the folder. "
            "Choose a folder below a folder that you own."
        )
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise ValueError(
            f"{named}: every user may write into {parent} (mode {stat.S_IMODE(state.st_mode):o}) and could replace the "
            f"folder. Run `chmod o-w {parent}`, or choose another folder."
        )


@cache
def _missing_user() -> int | None:
    """Returns the uid shown for all users outside this process's user namespace; None if the namespace has all users.

    The root folder of some containers, and folders mounted into a container, belong to this uid.
    """
    if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _ALL_USERS:
        return None
    return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


def _make_private(folder: Path, *, named: str) -> None:
    """Removes other users' permissions from a folder of this user; ``folder`` is not a link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"{named} belongs to another user (uid {found.st_uid}), who could read and change what Relax writes. "
                "Choose another folder."
            )
        if found.st_mode & stat.S_ISVTX or folder == Path("/"):
            raise ValueError(f"{named}: all users of this machine share this folder. Choose a folder below it.")
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)
            print(f"relax: {named}: other users could enter this folder; now its mode is 0700", file=sys.stderr)
    finally:
        os.close(descriptor)


def user_cache(*names: str) -> Path:
    """Returns a path in Relax's user cache: ``$XDG_CACHE_HOME/relax``, by default ``~/.cache/relax``.

    ``names`` are the parts of the path below the cache. An existing cache is made private; a missing cache is not
    created.
    """
    folder = Path(os.environ.get(CACHE_KEY) or Path.home() / ".cache", "relax")
    if folder.exists():
        private_folder(folder, key=CACHE_KEY)
    return folder.joinpath(*names)


def set_compile_cache(environment: MutableMapping[str, str]) -> None:
    """Sets the folder for torch's compiled code, unless the user has set it.

    torch's default is /tmp/torchinductor_NAME. Another user could create that folder first and put code into it.
    """
    if COMPILE_CACHE not in environment:
        environment[COMPILE_CACHE] = str(private_folder(user_cache("torchinductor"), key=CACHE_KEY))


def set_private_files() -> int:
    """Makes new files of this process and its later children private to this user. Returns the previous umask."""
    return os.umask(_OTHERS)


@contextmanager
def private_files() -> Iterator[None]:
    """Makes new files private to this user until the block ends."""
    earlier = set_private_files()
    try:
        yield
    finally:
        os.umask(earlier)


@contextmanager
def unshared_writes() -> Iterator[None]:
    """Makes new files writable only by this user until the block ends; the user's umask still decides who may read."""
    earlier = set_private_files()
    os.umask(earlier | 0o022)
    try:
        yield
    finally:
        os.umask(earlier)


_POLL_S = 0.1


@contextmanager
def file_locked(path: Path, *, deadline_s: float, makes: str) -> Iterator[None]:
    """Locks a file while the block runs, which excludes other processes.

    The kernel releases the lock when the process dies.

    Raises TimeoutError if another process holds the lock longer than ``deadline_s`` seconds. ``makes`` names for the
    error the thing that the lock's holder makes.
    """
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"waited {deadline_s:.0f} s for another process that makes {makes} (lock {path})"
                    ) from None
                time.sleep(_POLL_S)
        yield


def folder_made_once(folder: Path, make: Callable[[Path], None], *, deadline_s: float, makes: str) -> Path:
    """Returns a folder of the user's cache; ``make`` creates its content on first use.

    ``make`` fills an empty temporary folder, which is then renamed, so no process sees an incomplete folder. If several
    processes call this function at the same time, all wait for the first call. If ``make``, `private_folder` or
    `file_locked` raises, the error is passed on and the temporary folder is removed.
    """
    if folder.is_dir():
        return folder
    root = private_folder(folder.parent, key=CACHE_KEY)
    with file_locked(root / f".{folder.name}.lock", deadline_s=deadline_s, makes=makes):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder

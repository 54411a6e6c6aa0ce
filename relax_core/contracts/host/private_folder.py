"""Makes and checks folders that no other user of the machine can read, change or lock: run folders and caches."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

MODE = 0o700
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch and Triton keep compiled code below it
_OTHERS = 0o077  # the rights of a group and of everybody
_ROOT = 0


def private_folder(folder: Path, *, key: str, exist_ok: bool = True) -> Path:
    """Makes a folder of mode 0700 with its missing parents, or makes an existing folder private, and returns it.

    ``key`` names the setting in errors. Raises ValueError, with key, value and fix, if the folder or a parent belongs
    to another user, or if everybody may rename a parent: another user could then replace the folder. A folder below
    /tmp is fine, where only the owner of a file may rename it. Raises FileExistsError if the folder exists and
    ``exist_ok`` is False, and OSError if it cannot be made.

    A folder that a group may write into is accepted as a parent: members of a group are trusted.
    """
    whole = Path(os.path.abspath(folder))
    missing = [parent for parent in (whole, *whole.parents) if not os.path.lexists(parent)]
    for parent in reversed(missing[1:]):
        parent.mkdir(mode=MODE, exist_ok=True)
    check_parents(whole, key=key)
    try:
        whole.mkdir(mode=MODE)
    except FileExistsError:
        if not exist_ok:
            raise
        _make_private(whole, key=key)
    return folder


def check_parents(folder: Path, *, key: str) -> None:
    """Raises ValueError if another user could replace ``folder`` by renaming it or a parent of it."""
    if folder.is_symlink() and folder.lstat().st_uid not in (os.getuid(), _ROOT):
        raise ValueError(f"{key}={folder} is a link of another user, who could change it. Choose another folder.")
    for parent in {*folder.parents, *Path(os.path.realpath(folder)).parents}:
        found = parent.stat()
        if not stat.S_ISDIR(found.st_mode):
            continue  # the folder cannot be made, and its own error says so
        # Root of a container may work below a mounted folder of the person who started the container.
        if found.st_uid not in (os.getuid(), _ROOT) and os.getuid() != _ROOT:
            raise ValueError(
                f"{key}={folder}: {parent} belongs to another user (uid {found.st_uid}), who could replace the folder. "
                "Choose a folder below one of your own."
            )
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise ValueError(
                f"{key}={folder}: every user may write into {parent} (mode {stat.S_IMODE(found.st_mode):o}) and could "
                f"replace the folder. Run `chmod o-w {parent}`, or choose another folder."
            )


def _make_private(folder: Path, *, key: str) -> None:
    """Takes the rights of other users from an existing folder of this user."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise ValueError(
                f"{key}={folder} belongs to another user (uid {found.st_uid}), who could read and change what Relax "
                "writes. Choose another folder."
            )
        if found.st_mode & _OTHERS:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~_OTHERS)
    finally:
        os.close(descriptor)


def user_cache(*names: str) -> Path:
    """Returns a path in the user's cache of Relax: ``$XDG_CACHE_HOME/relax``, by default ``~/.cache/relax``.

    ``names`` are the parts of the path below it. The cache is made private if it exists, and not made otherwise.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relax")
    if cache.exists():
        private_folder(cache, key="XDG_CACHE_HOME")
    return cache.joinpath(*names)


def set_compile_cache(environment: MutableMapping[str, str]) -> None:
    """Sets the folder of code that torch compiles, unless the user has set it.

    torch's own default is /tmp/torchinductor_NAME. Another user could make that folder first and put code into it.
    """
    if COMPILE_CACHE not in environment:
        environment[COMPILE_CACHE] = str(private_folder(user_cache("torchinductor"), key="XDG_CACHE_HOME"))

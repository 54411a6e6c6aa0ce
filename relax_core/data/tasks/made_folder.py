"""Keeps folders of files that Relax makes once for each user and each version, below the user's cache folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from relax_core.contracts.host.file_lock import file_locked
from relax_core.contracts.host.private_folder import private_folder, user_cache

_LAST_FILE = ".complete"
_MAKE_DEADLINE_S = 120.0


def cache_folder() -> Path:
    """Returns the folder below which all folders of `made_folder` lie."""
    return user_cache().resolve()


def made_folder(name: str, make: Callable[[Path], None], *, what: str) -> Path:
    """Returns the folder ``name``, which ``make`` fills if it is not there; ``what`` names its content in an error.

    It is made in a temporary folder that is renamed, so that no process sees a half-made one.
    """
    root = cache_folder()
    folder = root / name
    if not (folder / _LAST_FILE).is_file():
        private_folder(root, key="XDG_CACHE_HOME")
        with file_locked(root / f".{name}.lock", deadline_s=_MAKE_DEADLINE_S, makes=what):
            if not (folder / _LAST_FILE).is_file():
                _make(folder, make)
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(partial)
        (partial / _LAST_FILE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

"""Writes folders that appear complete or not at all.

It has no heavy imports.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``target``; after the block its files are on disk and it becomes ``target``.

    An older ``target`` is replaced. If the block or the disk fails, the new folder is removed and the old one stays. An
    OSError then names what was not written, where, why, and how many bytes are free there.
    """
    partial, replaced = (target.with_name(f".{target.name}{suffix}") for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX))
    try:
        _settle(target, partial=partial, replaced=replaced)  # A process that was killed may have left both.
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
        sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, _failure_text(target, error)) from error
    finally:
        with suppress(OSError):  # what is left has a hidden name; the next write into the folder tries again
            _settle(target, partial=partial, replaced=replaced)


def recover_replaced(root: Path) -> None:
    """Gives replaced folders in ``root`` their names back after a process was killed while it replaced them.

    A process may be killed between the two renames of `atomic_folder`. No process may be writing into ``root``.
    """
    for replaced in root.glob(f".*{REPLACED_SUFFIX}"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
        if not target.exists():
            os.rename(replaced, target)


def _settle(target: Path, *, partial: Path, replaced: Path) -> None:
    """Leaves only ``target``: the new folder if it was renamed to it, and the older one otherwise."""
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)
    for stale in (partial, replaced):
        if stale.exists():
            shutil.rmtree(stale)


def _failure_text(target: Path, error: OSError) -> str:
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"{target} was not written: {error.strerror or error}. {free:,} bytes are free in {existing}. "
        "The files that were there before are unchanged; free some space or choose another folder."
    )


def _sync(folder: Path) -> None:
    """Puts ``folder`` and every file and folder below it on disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


def sync(path: Path) -> None:
    """Puts a file's bytes, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A folder that appears whole or not at all. No heavy imports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``target``; after the block its files are on disk and it becomes ``target``.

    An older ``target`` is replaced. Where the block or the disk fails, the new folder is removed and the old one stays;
    an OSError then says what was not written, where, why, and how many bytes are free there.
    """
    partial, replaced = (target.with_name(f".{target.name}{suffix}") for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX))
    try:
        _settle(target, partial=partial, replaced=replaced)  # after a process that was killed
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
        _settle(target, partial=partial, replaced=replaced)


def recover_replaced(root: Path) -> None:
    """After a process that was killed between the two renames of `atomic_folder`: the older folder, which stood aside
    already, gets its name back. For all folders in ``root``, into which nobody may be writing."""
    for replaced in root.glob(f".*{REPLACED_SUFFIX}"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED_SUFFIX))
        if not target.exists():
            os.rename(replaced, target)


def _settle(target: Path, *, partial: Path, replaced: Path) -> None:
    """Leaves only ``target``: the new one if it got there, else the one before."""
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)
    for stale_run in (partial, replaced):
        if stale_run.exists():
            shutil.rmtree(stale_run)


def _failure_text(target: Path, error: OSError) -> str:
    existing = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"{target} was not written: {error.strerror or error}. {free:,} bytes are free in {existing}. "
        "What was there before is untouched; make room or choose another folder."
    )


def _sync(folder: Path) -> None:
    """Every file and folder below ``folder``, and itself, to disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

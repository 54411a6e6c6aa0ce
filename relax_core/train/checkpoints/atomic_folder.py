"""Writes folders that appear complete or not at all.

It has no heavy imports.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from relax_core.contracts.host.output_path import numbered

PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
REMOVED_SUFFIX = ".removed"

log = logging.getLogger(__name__)


@contextmanager
def atomic_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder beside ``target``; after the block its files are on disk and it becomes ``target``.

    An older ``target`` is replaced. Without ``replace`` only a missing or an empty folder becomes ``target``, so that
    nothing of the user is removed, and a ``target`` with files is an OSError. If the block or the disk fails, the new
    folder is removed and the old one stays. An OSError then names what was not written, where, why, and how many bytes
    are free there.
    """
    partial, replaced = (target.with_name(f".{target.name}{suffix}") for suffix in (PARTIAL_SUFFIX, REPLACED_SUFFIX))
    try:
        _settle(target, partial=partial, replaced=replaced)  # A process that was killed may have left both.
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        if replace and target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)  # the kernel refuses a target that is neither missing nor an empty folder
        sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, _failure_text(target, error)) from error
    finally:
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
            remove_folder(stale)


def remove_folder(folder: Path) -> None:
    """Removes a folder that is of no use any more, and lets the work go on if a part of it cannot be removed.

    The folder is first renamed to ``.NAME.removed``, so that no reader finds a part of it and its name is free. A file
    may be held by another machine, or protected: then the folder keeps that name, and a warning names file and reason.
    """
    removed = folder
    if folder.suffix != REMOVED_SUFFIX:
        hidden = folder.with_name(f".{folder.name.removeprefix('.')}{REMOVED_SUFFIX}")
        removed = next(each for each in numbered(hidden, suffix=REMOVED_SUFFIX) if not each.exists())
        try:
            folder.rename(removed)
        except OSError as error:
            _warn(folder, str(error))
            return

    problems: list[str] = []

    def note(_: Callable[..., Any], path: str, why: tuple[type[BaseException], BaseException, Any]) -> None:
        if not isinstance(why[1], FileNotFoundError):  # another process may remove the same folder
            problems.append(f"{path}: {getattr(why[1], 'strerror', None) or why[1]}")

    shutil.rmtree(removed, onerror=note)
    if problems:
        _warn(removed, problems[0])  # the folders above that file cannot be removed either


def unremoved(root: Path) -> list[Path]:
    """Returns the folders in ``root`` that `remove_folder` could not remove."""
    with suppress(FileNotFoundError):
        return sorted(root.glob(f".*{REMOVED_SUFFIX}"))
    return []


@cache
def _warn(folder: Path, why: str) -> None:
    """Logs a reason once, although the removal is tried again at each checkpoint."""
    log.warning("%s cannot be removed and stays: %s", folder, why)


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

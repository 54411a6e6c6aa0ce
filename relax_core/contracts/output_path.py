"""Checks the output paths of commands, so commands never overwrite or remove existing files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from relax_core.contracts.private_folder import private_folder


def check_output_folder(folder: Path, *, option: str) -> None:
    """Raises ValueError, with ``option``, value and fix, if ``folder`` exists and is not an empty folder."""
    fix = "Name a folder that does not exist, or an empty one."
    if folder.is_symlink():
        raise ValueError(f"{option}={folder} is a link, which would be replaced. {fix}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option}={folder} is a file. {fix}")
    if folder.exists() and folder.resolve() == Path.cwd():
        raise ValueError(f"{option}={folder} is the working folder. {fix}")
    if folder.exists() and (first := next(iter(sorted(folder.iterdir())), None)) is not None:
        raise ValueError(f"{option}={folder} is not empty: it has {first.name}, and nothing is overwritten. {fix}")


def check_output_file(path: Path, *, option: str) -> None:
    """Raises ValueError, with ``option``, value and fix, if ``path`` exists or its folder is missing."""
    if path.is_symlink() or path.exists():
        raise ValueError(f"{option} {path} exists, and nothing is overwritten. Name another file, or remove it.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist. Make it, or name another file.")


def numbered(path: Path, *, suffix: str = "") -> Iterator[Path]:
    """Yields ``path``, then the same name with increasing numbers before ``suffix``, without end: NAME-2, NAME-3."""
    name = path.name.removesuffix(suffix)
    return itertools.chain([path], (path.with_name(f"{name}-{number}{suffix}") for number in itertools.count(2)))


def next_free(path: Path) -> Path:
    """Returns the first path that does not exist among ``path`` and its numbered names: trace.json, trace-2.json, …."""
    return next(
        candidate
        for candidate in numbered(path, suffix=path.suffix)
        if not (candidate.exists() or candidate.is_symlink())
    )


def new_private_folder(wanted: Path, *, key: str) -> Path:
    """Makes the folder ``wanted`` as `private_folder` does, if ``wanted`` is missing or empty.

    Otherwise makes the next free folder, such as DIR-2. Returns the folder. Raises as `private_folder` does.
    """
    for folder in numbered(wanted):
        empty = folder.is_dir() and not any(folder.iterdir())
        if empty or not folder.exists():
            try:
                return private_folder(folder, key=key, exist_ok=empty)
            except FileExistsError:  # another process has just made the folder
                continue
    raise AssertionError("`numbered` does not end")

"""Resolves the configured training files and their shares."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.schema import DataConfig

_WANTED = "Give a list of files, [a.jsonl,more/*.parquet], or files with their weights, {a.jsonl:3,b.jsonl:1}"


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Files that are drawn from together.

    ``weight`` is their share of the prompts relative to the other parts' weights; None if every row of every file comes
    once in each epoch.
    """

    files: tuple[Path, ...]
    weight: float | None = None


def data_parts(config: DataConfig) -> list[FilePart]:
    """Returns the files of ``data.path`` or ``data.paths`` in the order in which their rows are numbered.

    Wildcards are resolved. A list is one part; in a mapping each entry is a part. Raises ValueError (key, value, fix)
    for an entry that names no file, and for a file that is named twice.
    """
    assert config.task is None
    if config.path is not None:
        return [FilePart(files=(Path(config.path),))]
    paths = config.paths
    if isinstance(paths, Mapping) and paths:
        parts = [FilePart(files=_files(str(name)), weight=_weight(name, weight)) for name, weight in paths.items()]
    elif isinstance(paths, list) and paths:
        parts = [FilePart(files=tuple(file for name in paths for file in _files(name)))]
    else:
        raise ValueError(f"data.paths={paths}: it names no file. {_WANTED}.")
    seen: set[Path] = set()
    for file in (file for part in parts for file in part.files):
        if file in seen:
            raise ValueError(f"data.paths: {file} is named twice. Name it once.")
        seen.add(file)
    return parts


def _files(name: object) -> tuple[Path, ...]:
    """Returns one file, or the files that a pattern with * ? [ matches, in alphabetical order."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"data.paths: {name!r} is no path. {_WANTED}.")
    if not glob.has_magic(name) or Path(name).exists():
        return (Path(name),)
    found = tuple(Path(one) for one in sorted(glob.glob(name, recursive=True)) if Path(one).is_file())
    if not found:
        raise ValueError(f"data.paths: no file matches {name}.")
    return found


def _weight(name: object, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"data.paths: {name} has weight {weight!r}. Give a number above 0.")
    return float(weight)

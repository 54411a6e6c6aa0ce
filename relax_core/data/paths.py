"""Which files the training rows are read from, and in which shares."""

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
    """Files that are drawn from together. ``weight``: their share of the prompts beside the other parts' weights; None
    where every row of every file comes once an epoch."""

    files: tuple[Path, ...]
    weight: float | None = None


def data_parts(config: DataConfig) -> list[FilePart]:
    """The files of ``data.path`` or ``data.paths``, wildcards resolved, in the order in which their rows are numbered.

    A list is one part, a mapping one part an entry. Raises ValueError (key, value, fix) for what names no file, or one
    file twice.
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
    """One file, or those that a pattern with * ? [ matches, in alphabetical order."""
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

"""Resolves the configured training files and their weights."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.schema import DataConfig
from relax_core.data.data_files import READERS, data_suffix

_WANTED = "Give a list of files, [a.jsonl,more/*.parquet], or files with their weights, {a.jsonl:3,b.jsonl:1}"
_NO_ROWS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")  # of Hugging Face's datasets
_SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])")


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Holds files with a common weight.

    The files' share of the prompts is ``weight`` divided by the sum of all weights. If ``weight`` is None, each epoch
    contains every row of every file once.
    """

    files: tuple[Path, ...]
    weight: float | None = None


def data_parts(config: DataConfig) -> list[FilePart]:
    """Returns the files of ``data.path`` or ``data.paths`` in the order of their row numbers.

    Wildcards and folders are resolved. A list is one part; in a mapping each entry is a part. Raises ValueError (key,
    value, fix) for an entry that names no file, and for a file that is named twice, also through a link.
    """
    assert config.task is None
    paths, key = config.paths, "data.path" if config.path is not None else "data.paths"
    if config.path is not None:
        parts = [FilePart(files=data_files(config.path, key=key))]
    elif isinstance(paths, Mapping) and paths:
        parts = [FilePart(files=data_files(str(name)), weight=_weight(name, weight)) for name, weight in paths.items()]
    elif isinstance(paths, list) and paths:
        parts = [FilePart(files=tuple(file for name in paths for file in data_files(name)))]
    else:
        raise ValueError(f"data.paths={paths}: it names no file. {_WANTED}.")
    seen: dict[object, Path] = {}
    for file in (file for part in parts for file in part.files):
        identity = (file.stat().st_dev, file.stat().st_ino) if file.exists() else file
        if identity in seen:
            same = "" if seen[identity] == file else f": {seen[identity]} is the same file"
            raise ValueError(f"{key}: {file} is named twice{same}. Name it once.")
        seen[identity] = file
    return parts


def data_files(name: object, *, key: str = "data.paths") -> tuple[Path, ...]:
    """Returns a file, the files that match a pattern with * ? [, or a folder's data files, in alphabetical order.

    Raises ValueError (key, value, fix) for a pattern that matches no file, for a folder without data files, and for a
    folder with files of several kinds or splits.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{key}: {name!r} is not a path. {_WANTED}.")
    if (folder := Path(name)).is_dir():
        return _folder_files(folder, key)
    if not glob.has_magic(name) or Path(name).exists():
        return (Path(name),)
    found = tuple(Path(path) for path in sorted(glob.glob(name, recursive=True)) if Path(path).is_file())
    if not found:
        raise ValueError(f"{key}: no file matches {name}.")
    return found


def _folder_files(folder: Path, key: str) -> tuple[Path, ...]:
    """Returns the data files in a folder; all must have the same kind and the same split."""
    inside = sorted(folder.iterdir())
    files = [
        path
        for path in inside
        if data_suffix(path) in READERS and path.name not in _NO_ROWS and path.name[0] not in "._"
    ]
    if not files:
        kinds = [path for suffix in READERS for path in sorted(folder.rglob(f"*{suffix}"))]
        below = sorted({str(path.parent) for path in kinds if path.name not in _NO_ROWS})
        more = f" These folders below it have some: {', '.join(below[:5])}." if below else ""
        raise ValueError(f"{key}={folder}: the folder has no file of {', '.join(READERS)}.{more}")
    suffixes = sorted({data_suffix(file) for file in files})
    splits = {found[1] if (found := _SPLIT.search(file.stem.lower())) else "" for file in files}
    if len(suffixes) == 1 and (len(splits) == 1 or splits <= {"", "train"}):
        return tuple(files)
    what = "kinds" if len(suffixes) > 1 else "splits"
    start = "train" if "train" in splits else ""
    raise ValueError(
        f"{key}={folder}: the folder has files of several {what}, such as {files[0].name} and {files[-1].name}. Name "
        f"those to train on: {key}='{folder}/{start}*{suffixes[-1]}'."
    )


def _weight(name: object, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"data.paths: {name} has weight {weight!r}. Give a number above 0.")
    return float(weight)

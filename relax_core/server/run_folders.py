"""Finds runs below the user's folders, and safely opens files inside a run's folder.

`log_files`, `log_chunk` and `search_log` read a run's logs. The content of a run's folder is untrusted. An unreadable
file affects only its run.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sqlite3
import stat
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import psutil

from relax_core.contracts.untrusted_files import decode_json, open_plain, read_plain_file, shown_line

MARKS = ("metrics.jsonl", "config.yaml")  # a folder with one of these files is a run's folder
MAX_DEPTH, MAX_RUNS = 3, 200
MAX_ENTRIES, MAX_BELOW = 20_000, 5_000  # limits of entries read: of a folder that the user named, and of a folder below
SEARCH_S = 2.0  # time limit of the search in all folders
SILENT_S = 120.0  # a run of another host has ended if it has written nothing for this time
LOCK, SUMMARY, METRICS = ".lock", "summary.json", "metrics.jsonl"
MAX_SUMMARY, MAX_LOCK = 4 * 2**20, 200  # limits of bytes read of these files
MAX_WORDS, MAX_NAME = 300, 200  # limits of characters: of a reason, and of a run's name
UNREADABLE = "unreadable"
# Errors from reading an untrusted file. SQLite out of memory raises MemoryError. A link to itself or a too deeply
# nested text raises RuntimeError.
BROKEN = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, AssertionError, sqlite3.Error),
)


class NotInside(ValueError):
    """The path leads out of the run's folder, or does not lead to a plain file."""


class RunStatus(NamedTuple):
    """Holds the state of a run. ``problem`` is the reason why its files cannot be read, or ""."""

    state: str
    problem: str = ""


class _Summary(msgspec.Struct):
    outcome: str


_OUTCOME = re.compile(r"[a-z][a-z_ -]{0,39}(: .*)?", re.DOTALL)  # "finished", or "failed: CAUSE"
_summary = msgspec.json.Decoder(_Summary)


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Returns id → path of the runs in or below the folders, newest first. The id depends only on the path.

    Links below the folders are not followed. Folders are searched level by level for at most `SEARCH_S` seconds. So a
    folder with a million entries does not hide the runs next to it.
    """
    found: set[Path] = set()
    level, until = list(folders), time.monotonic() + SEARCH_S
    for depth in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            if any(os.path.lexists(folder / mark) for mark in MARKS):
                found.add(Path(os.path.realpath(folder)))
            elif time.monotonic() < until:
                below += _folders_in(folder, MAX_BELOW if depth else MAX_ENTRIES)
        level = below
    ordered = sorted(found, key=_changed_s, reverse=True)[:MAX_RUNS]
    return {run_id(path): path for path in ordered}


def run_id(path: Path) -> str:
    """Returns the id of a run's folder in URLs of the page."""
    return hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()


def run_name(path: Path) -> str:
    """Returns the name of a run's folder, safe to display."""
    return shown_line(path.name)[:MAX_NAME]


def _folders_in(folder: Path, most: int) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in islice(entries, most)
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:  # unreadable or removed
        return []


def files_in(run_dir: Path, *parts: str, most: int) -> list[Path]:
    """Returns at most ``most`` files in a subfolder of the run, sorted.

    Empty if the subfolder is not inside the run.
    """
    folder = run_dir.joinpath(*parts)
    if os.path.realpath(folder) != os.path.join(os.path.realpath(run_dir), *parts):
        return []
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in islice(entries, most))
    except OSError:
        return []


def _changed_s(run_dir: Path) -> float:
    return max((_modified_s(run_dir / mark) for mark in MARKS), default=0.0)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def inside(run_dir: Path, *parts: str) -> Path:
    """Returns the path of a plain file in the run's folder. ``parts`` are names without "/".

    Raises NotInside for a part with "/", for "..", for a link that leads out of the folder, and for anything except a
    plain file. Raises FileNotFoundError if the file does not exist.
    """
    named = all(Path(part).name == part and part != ".." for part in parts)
    try:
        real = run_dir.joinpath(*parts).resolve(strict=True) if named else run_dir
        plain = named and real.is_relative_to(run_dir.resolve()) and stat.S_ISREG(real.stat().st_mode)
    except (RuntimeError, NotADirectoryError) as error:  # a link to itself
        raise NotInside(f"{'/'.join(parts)} is not a file in the run's folder") from error
    if not plain:
        raise NotInside(f"{'/'.join(parts)} is not a file in the run's folder")
    return real


def open_inside(run_dir: Path, *parts: str) -> BinaryIO:
    """Opens the file of `inside`.

    Raises the errors of `inside`, also if another process replaces the file meanwhile.
    """
    file = open_plain(inside(run_dir, *parts))
    if not Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(run_dir.resolve()):
        file.close()
        raise NotInside(f"{'/'.join(parts)} is not a file in the run's folder")
    return file


def run_state(run_dir: Path) -> str:
    """Returns "live", the outcome in summary.json, or "crashed" for a run that ended without a summary.

    A run is live while the process that locked its folder exists. For a run of another host this cannot be checked.
    Such a run is live while it writes files. A run with an unreadable summary.json is "unreadable".
    """
    return run_status(run_dir).state


def run_status(run_dir: Path) -> RunStatus:
    """Returns the state like `run_state`, and the reason why the summary cannot be read."""
    if _process_lives(run_dir):
        return RunStatus("live")
    try:
        summary = decode_json(read_plain_file(inside(run_dir, SUMMARY), max_bytes=MAX_SUMMARY), _summary)
    except FileNotFoundError:
        return RunStatus("crashed")
    except (OSError, ValueError) as error:
        return RunStatus(UNREADABLE, reason(SUMMARY, error))
    if not _OUTCOME.fullmatch(summary.outcome):
        return RunStatus(
            UNREADABLE, f"{SUMMARY}: outcome={shown_line(summary.outcome)[:MAX_NAME]} is not an outcome of a run"
        )
    return RunStatus(shown_line(summary.outcome)[:MAX_NAME])


def reason(name: str, error: BaseException) -> str:
    """Returns the reason why a file cannot be read, as one line that is safe to display."""
    message = str(error) or type(error).__name__
    return shown_line(message if name in message else f"{name}: {message}")[:MAX_WORDS]


def _process_lives(run_dir: Path) -> bool:
    lock = run_dir / LOCK
    try:
        with open_inside(run_dir, LOCK) as file:
            words = file.read(MAX_LOCK).decode("utf-8", "replace").split()
    except (OSError, ValueError):
        return False
    if len(words) != 4 or not words[1].isdecimal():
        return False
    if words[3] != socket.gethostname():
        newest = max(_modified_s(run_dir / METRICS), _modified_s(lock))
        return time.time() - newest < SILENT_S and _modified_s(run_dir / SUMMARY) < newest
    try:
        return bool(psutil.Process(int(words[1])).create_time() <= _modified_s(lock) + 1.0)
    except (psutil.Error, OverflowError):
        return False


# -- Logs --------------------------------------------------------------------------------------------------------------
LOGS = "logs"
CHUNK = 64 * 2**10
SEARCHED_BYTES, MAX_FOUND, MAX_LINE = 64 * 2**20, 500, 2000
MAX_READ_LINE = 2**20  # a longer line is searched in pieces of this number of bytes
MAX_FILES = 5000


def log_files(run_dir: Path) -> list[dict[str, Any]]:
    """Returns name and size in bytes of each log file, for at most `MAX_FILES` files.

    Leaves out links out of the run's folder, special files, and names that are not valid text.
    """
    found = []
    for path in files_in(run_dir, LOGS, most=MAX_FILES):
        try:
            size = inside(run_dir, LOGS, path.name).stat().st_size
            path.name.encode()
        except (OSError, ValueError):  # not a plain file, or the name is not valid text
            continue
        found.append({"name": path.name, "size": size})
    return found


def log_chunk(run_dir: Path, name: str, start: int | None) -> dict[str, Any]:
    """Returns at most 64 KiB of text and the position of the next byte. ``start`` None reads the file's end.

    A chunk ends after a complete line. A later call returns an unfinished line. A line above 64 KiB is split. Raises
    the errors of `inside`.
    """
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        first = max(0, size - CHUNK) if start is None or start > size else max(0, start)
        file.seek(first)
        data = file.read(CHUNK)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == CHUNK:
        end = len(data)
    return {"text": data[:end].decode("utf-8", "replace"), "from": first, "next": first + end, "size": size}


def search_log(run_dir: Path, name: str, words: str) -> dict[str, Any]:
    """Returns the last 500 lines with ``words`` in the last 64 MiB of the file. Ignores case."""
    wanted = words.casefold()
    found: list[str] = []
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - SEARCHED_BYTES))
        while line := file.readline(MAX_READ_LINE):
            text = line.decode("utf-8", "replace").rstrip("\n")
            if wanted in text.casefold():
                found.append(text[:MAX_LINE])
                del found[:-MAX_FOUND]
    return {"text": "\n".join(found), "found": len(found), "size": size}

"""Finds runs below the folders that the user named, and opens only files that lie in a run's folder."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

MARKS = ("metrics.jsonl", "config.yaml")  # a folder with one of them is a run's
MOST_DEPTH, MOST_RUNS = 3, 200
SILENT_S = 120.0  # a run of another host that has written nothing for so long counts as ended
LOCK, SUMMARY, METRICS = ".lock", "summary.json", "metrics.jsonl"


class NotInside(ValueError):
    """The path leads out of the run's folder, or to something that is no plain file."""


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Returns the runs in or below the folders, the newest first, by an id that depends on the path alone.

    Links are not followed below the folders.
    """
    found = {path.resolve() for folder in folders for path in _runs_below(folder, MOST_DEPTH)}
    ordered = sorted(found, key=_changed_s, reverse=True)[:MOST_RUNS]
    return {run_id(path): path for path in ordered}


def run_id(path: Path) -> str:
    """Returns the id of a run's folder in addresses of the page."""
    return hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / mark).is_file() for mark in MARKS):
        yield folder
        return
    if depth:
        try:
            children = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:  # it cannot be read or has gone
            return
        for entry in children:
            if not entry.name.startswith("."):
                yield from _runs_below(Path(entry.path), depth - 1)


def _changed_s(run_dir: Path) -> float:
    return max((_modified_s(run_dir / mark) for mark in MARKS), default=0.0)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def inside(run_dir: Path, *parts: str) -> Path:
    """Returns the path of a plain file in the run's folder; each part is a name without "/".

    Raises NotInside for another part, "..", a link that leads out of the folder, or anything but a plain file, and
    FileNotFoundError if there is nothing.
    """
    named = all(Path(part).name == part and part != ".." for part in parts)
    real = run_dir.joinpath(*parts).resolve(strict=True) if named else run_dir
    if not named or not real.is_relative_to(run_dir.resolve()) or not real.is_file():
        raise NotInside(f"{'/'.join(parts)} is no file in the run's folder")
    return real


def run_state(run_dir: Path) -> str:
    """Returns "live", the outcome in summary.json, or "crashed" for a run that ended without a summary.

    A run is live while the process that holds its folder exists. That cannot be seen for a run of another host, which
    counts as live while it writes.
    """
    if _process_lives(run_dir):
        return "live"
    try:
        return str(_summary_outcome(inside(run_dir, SUMMARY)))
    except (OSError, ValueError):
        return "crashed"


def _process_lives(run_dir: Path) -> bool:
    try:
        lock = inside(run_dir, LOCK)
        words = lock.read_text(encoding="utf-8", errors="replace")[:200].split()
    except (OSError, ValueError):
        return False
    if len(words) != 4 or not words[1].isdecimal():
        return False
    if words[3] != socket.gethostname():
        newest = max(_modified_s(run_dir / METRICS), _modified_s(lock))
        return time.time() - newest < SILENT_S and _modified_s(run_dir / SUMMARY) < newest
    try:
        return bool(psutil.Process(int(words[1])).create_time() <= _modified_s(lock) + 1.0)
    except psutil.Error:
        return False


def _summary_outcome(path: Path) -> object:
    import msgspec

    return msgspec.json.decode(path.read_bytes(), type=dict[str, object])["outcome"]

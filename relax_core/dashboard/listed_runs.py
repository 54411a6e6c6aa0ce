"""Makes the list of runs: the state of each, and why a file of it cannot be read, from looks that cost little."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from relax_core.contracts.foreign_files import decode_json, read_whole
from relax_core.contracts.shown_text import shown_line
from relax_core.dashboard.foreign_yaml import decode_yaml
from relax_core.dashboard.run_folders import (
    BROKEN,
    METRICS,
    MOST_SUMMARY,
    SUMMARY,
    UNREADABLE,
    Standing,
    inside,
    reason,
    run_name,
    run_standing,
)
from relax_core.dashboard.run_reader import CONFIG, MOST_CONFIG, SUMMARY_DECODER
from relax_core.dashboard.sqlite_files import connect, readable_database
from relax_core.observe.alarms.alarm_book import FILE as ALARMS
from relax_core.observe.service.sinks import TEXTS_FILE

LOOK_S = 2.0  # for the files of all runs of one list
DATABASES = {"ledger.sqlite": ("events", "restores"), "operations.sqlite": ("orders", "states")}
FILES = (CONFIG, METRICS, TEXTS_FILE, ALARMS, SUMMARY, *DATABASES)


class ListedRuns:
    """Tells of each run what the list shows; a run is looked at anew once one of its files has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, str]] = {}

    def __call__(self, found: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Returns id, name, folder, state and problem of each run; a run whose files cannot be read is unreadable."""
        self._known = {run: known for run, known in self._known.items() if run in found}
        rows, until = [], time.monotonic() + LOOK_S
        for run, path in found.items():
            standing = self._standing(run, path, until)
            folder = shown_line(str(path))
            rows.append({"id": run, "name": run_name(path), "folder": folder, **standing._asdict()})
        return rows

    def _standing(self, run: str, path: Path, until: float) -> Standing:
        standing = run_standing(path)
        if standing.problem:
            return standing
        seen = tuple(_seen(path / name) for name in FILES)
        known = self._known.get(run)
        if known is None or known[0] != seen:
            if time.monotonic() > until:  # the next list looks at it
                return standing
            known = self._known[run] = (seen, _problem(path))
        return Standing(UNREADABLE, known[1]) if known[1] else standing


def _seen(path: Path) -> object:
    try:
        found = path.lstat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def _problem(run_dir: Path) -> str:
    """Returns why one of the run's files cannot be read, "" if all of them look right."""
    for name in FILES:
        try:
            path = inside(run_dir, name)
            if name == CONFIG:
                decode_yaml(read_whole(path, most_bytes=MOST_CONFIG).decode("utf-8", "replace"))
            if name == SUMMARY:
                decode_json(read_whole(path, most_bytes=MOST_SUMMARY), SUMMARY_DECODER)
            if not os.access(path, os.R_OK):
                raise PermissionError("it may not be read")
            if name in DATABASES and readable_database(run_dir, name) is not None:
                with closing(connect(path, *DATABASES[name])):
                    pass
        except FileNotFoundError:
            continue
        except BROKEN as error:
            return reason(name, error)
    return ""

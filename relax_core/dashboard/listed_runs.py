"""Makes the list of runs: state, newest figures, and why a file cannot be read, from looks that cost little."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

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
    changed_s,
    inside,
    reason,
    run_name,
    run_standing,
)
from relax_core.dashboard.run_reader import CONFIG, MOST_CONFIG, SUMMARY_DECODER
from relax_core.dashboard.run_series import NewestFigures, newest_figures
from relax_core.dashboard.sqlite_files import connect, readable_database
from relax_core.observe.alarms.alarm_book import FILE as ALARMS
from relax_core.observe.service.sinks import TEXTS_FILE

LOOK_S = 2.0  # for the files of all runs of one list
DATABASES = {"ledger.sqlite": ("events", "restores"), "operations.sqlite": ("orders", "states")}
FILES = (CONFIG, METRICS, TEXTS_FILE, ALARMS, SUMMARY, *DATABASES)
MOST_LABEL = 100  # characters


class _RunKeys(msgspec.Struct):
    steps: int | None = None


class _Config(msgspec.Struct):
    """Is what the list shows of a configuration."""

    name: str = ""
    run: _RunKeys = msgspec.field(default_factory=_RunKeys)


class _Look(NamedTuple):
    """Is what a look at the files of a run found: why one of them cannot be read, and what the list shows of them."""

    problem: str = ""
    config: _Config = _Config()
    newest: NewestFigures = NewestFigures()


class ListedRuns:
    """Gives the rows of the list of runs; the files of a run are read again once one of them has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, _Look]] = {}

    def __call__(self, found: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Returns a row for each run: id, name, label, folder, state, problem, age in seconds, and figures.

        A run whose files cannot be read is unreadable. The figures are the train steps done, of how many, the reward,
        and the share of held-out answers that are fully right, each None if it is not known.
        """
        self._known = {run: known for run, known in self._known.items() if run in found}
        rows, until = [], time.monotonic() + LOOK_S
        for run, path in found.items():
            standing, look = run_standing(path), _Look()
            if not standing.problem:
                look = self._look(run, path, until)
                standing = Standing(UNREADABLE, look.problem) if look.problem else standing
            row = {
                "id": run,
                "name": run_name(path),
                "label": shown_line(look.config.name)[:MOST_LABEL],
                "folder": shown_line(str(path)),
                "age_s": max(0.0, time.time() - changed_s(path)),
                "of_steps": look.config.run.steps,
            }
            rows.append(row | standing._asdict() | look.newest._asdict())
        return rows

    def _look(self, run: str, path: Path, until: float) -> _Look:
        seen = tuple(_seen(path / name) for name in FILES)
        known = self._known.get(run)
        if known is None or known[0] != seen:
            if time.monotonic() > until:  # the next list looks at it
                return _Look()
            known = self._known[run] = (seen, _looked(path))
        return known[1]


def _seen(path: Path) -> object:
    try:
        found = path.lstat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def _looked(run_dir: Path) -> _Look:
    config, newest = _Config(), NewestFigures()
    for name in FILES:
        try:
            path = inside(run_dir, name)
            if name == CONFIG:
                values = decode_yaml(read_whole(path, most_bytes=MOST_CONFIG).decode("utf-8", "replace"))
                with suppress(msgspec.ValidationError):  # another program's file has other keys
                    config = msgspec.convert(values, _Config)
            if name == METRICS:
                newest = newest_figures(run_dir)
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
            return _Look(reason(name, error))
    return _Look("", config, newest)
